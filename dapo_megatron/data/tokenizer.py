"""The model's tokenizer, without torch: the `tokenizers` library and the checkpoint's own files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dapo_megatron.data.rows import Content, Message
from dapo_megatron.errors import UserError


class Tokenizer:
    """Text to token ids and back, as the Hugging Face checkpoint in `folder` defines it.

    Raises UserError when tokenizer.json is missing or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"model.path: {self.folder} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"model.path: {path} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = self._read_json("tokenizer_config.json")
        self._chat_template = self._find_chat_template()

    def encode_prompts(self, prompts: Sequence[Content]) -> list[list[int]]:
        """Token ids of each prompt. A text gets no special tokens; messages get those of the chat template.

        Raises:
            UserError: when there are messages but the checkpoint has no chat template.
        """
        chats = iter(self._render([list(prompt) for prompt in prompts if not isinstance(prompt, str)]))
        texts = [prompt if isinstance(prompt, str) else next(chats) for prompt in prompts]
        return self._encode(texts)

    def encode_answers(self, answers: Sequence[str], stop: Sequence[str]) -> list[list[int]]:
        """Token ids of each answer as a server would have ended it: with the first stop string, or end-of-sequence.

        Raises:
            UserError: when there is no stop string and the checkpoint names no end-of-sequence token.
        """
        if stop:
            return self._encode([answer + stop[0] for answer in answers])
        end = self._end_of_answer()
        return [[*ids, end] for ids in self._encode(answers)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Text of each token by itself, special tokens included; U+FFFD stands for a part of a character."""
        return tuple(self._tokenizer.decode_batch([[i] for i in token_ids], skip_special_tokens=False))

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included, by its text as the tokenizer writes it."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def end_token_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Ids at which an answer ends, ascending: end-of-sequence, and each token whose text contains a stop string."""
        ids = self._end_of_sequence_ids()
        if stop:
            vocabulary = range(self._tokenizer.get_vocab_size(with_added_tokens=True))
            texts = self._tokenizer.decode_batch([[i] for i in vocabulary], skip_special_tokens=False)
            ids.update(i for i, text in enumerate(texts) if any(string in text for string in stop))
        return tuple(sorted(ids))

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def _end_of_answer(self) -> int:
        """The tokenizer's own end-of-sequence token, or else the first of those that the checkpoint names."""
        token = self._special_tokens().get("eos_token")
        token_id = self._tokenizer.token_to_id(token) if token else None
        if token_id is None:
            token_id = min(self._end_of_sequence_ids(), default=None)
        if token_id is None:
            raise UserError(
                f"model.path: {self.folder} names no end-of-sequence token, with which answers would end; "
                "give rollout.stop"
            )
        return token_id

    def _end_of_sequence_ids(self) -> set[int]:
        """All that the checkpoint names: chat models end at a token of generation_config.json, base models at eos."""
        ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            found = self._read_json(name).get("eos_token_id")
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        token = self._special_tokens().get("eos_token")
        token_id = self._tokenizer.token_to_id(token) if token else None
        return ids if token_id is None else ids | {token_id}

    def _special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... as text; the file holds them as text or as {"content": text}."""
        named = {key: value for key, value in self._config.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
        return {key: value for key, value in texts.items() if isinstance(value, str)}

    def _find_chat_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template

    def _render(self, conversations: list[list[Message]]) -> list[str]:
        if not conversations:
            return []
        if self._chat_template is None:
            raise UserError(f"model.path: {self.folder} has no chat template, but the data set has chat messages")
        # Loaded here because it takes 2 s and 40 MB, which plain texts do without.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template(
            conversations=conversations,
            chat_template=self._chat_template,
            add_generation_prompt=True,
            **self._special_tokens(),
        )
        return list(texts)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            content: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"model.path: {path} is not valid JSON: {error}") from error
        return content
