"""Prompts with images: what a model gets for their tokens."""

import torch

from torchtune.generation import images_of_batch


def test_tokens_after_a_prompt_see_the_images_of_its_last_token():
    """The image is the last token of the prompt, so that no other row of its mask shows the image."""
    mask = torch.tensor([[[False, False], [False, False], [True, True]]])  # [1, s, t]
    prompt_images = {"encoder_input": {"images": torch.zeros(1)}, "encoder_mask": mask}
    positions = torch.tensor([[1, 2, 3, 4]])
    arguments = images_of_batch([prompt_images], lengths=[3], positions=positions)
    assert arguments["encoder_mask"].tolist() == [[[False, False], [True, True], [True, True], [True, True]]]
