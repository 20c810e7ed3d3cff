# SPDX-License-Identifier: Apache-2.0
"""A reasoning parser for the tiny model: reasoning ends with the first line (`reasoning_parser_plugin`)."""

from collections.abc import Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("until_newline")
class UntilNewline(ReasoningParser):
    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return False  # of a prompt

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self.vocab["Ċ"] in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        raise NotImplementedError("offline engines do not split answers")

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        raise NotImplementedError("offline engines do not split answers")

    def extract_reasoning_streaming(self, *_: Any) -> None:
        raise NotImplementedError("offline engines do not split answers")
