"""Text and tokens: tokenizers, chat templates, the incremental detokenizer, the stop matcher. Used by ``engine``,
``api`` and ``startup``; imports of the package only its errors."""

from metrale_async.text.chat_template import ChatTemplate, Message
from metrale_async.text.detokenizer import IncrementalDetokenizer
from metrale_async.text.stop_matcher import StopMatcher, StopResult
from metrale_async.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Message", "StopMatcher", "StopResult", "Tokenizer"]
