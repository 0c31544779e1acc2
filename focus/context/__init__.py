"""What the policy sees: context managers by name."""

from focus.context.base import ChatEncoder, Context, ContextManager
from focus.context.full import Full
from focus.context.summarize import Summarize

# name -> factory(chat, **options)
CONTEXT_MANAGERS = {"full": Full, "summarize": Summarize}

__all__ = ["CONTEXT_MANAGERS", "ChatEncoder", "Context", "ContextManager", "Full", "Summarize"]
