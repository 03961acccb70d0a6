"""An environment: a calculator, which the model calls as a tool."""

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """One for every answer; the model's last turn is scored by a reward function."""

    def reset(self) -> None:
        """Begin an episode, in which nothing has to be remembered."""

    def calculate(self, expression: str) -> str:
        """Compute an expression of numbers, +, - and *."""
        try:
            return str(_value(ast.parse(expression, mode="eval").body))
        except (SyntaxError, KeyError, AttributeError, TypeError, RecursionError):
            return "Error: only numbers, +, - and *"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise TypeError(node)
