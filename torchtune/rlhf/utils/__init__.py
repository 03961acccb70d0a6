"""Compatibility: conversion of the weights of Llama-like reward models."""

from torchtune.rlhf.utils._convert_weights import reward_hf_to_tune, reward_tune_to_hf

__all__ = ["reward_hf_to_tune", "reward_tune_to_hf"]
