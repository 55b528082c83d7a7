"""One row of a data set before tokenisation."""

from dataclasses import dataclass

Message = dict[str, str]
"""A chat message: `role` and `content`."""

Content = str | tuple[Message, ...]
"""A prompt: chat messages for the model's chat template, or a text that is used as it stands."""


@dataclass(frozen=True)
class Row:
    """A prompt and its gold answer."""

    prompt: Content
    ground_truth: str
    data_source: str = ""
