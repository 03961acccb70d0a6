"""Messages, prompt templates, masks and collation: text in, token rows out."""

from torchtune.data._documents import Documents as Documents
