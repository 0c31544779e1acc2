"""What the policy sees: context managers by name."""

from focus.context.base import ChatEncoder, Context, ContextManager
from focus.context.cite_summary import CiteSummary
from focus.context.full import Full
from focus.context.summarize import Summarize

# name -> factory(chat, **options)
CONTEXT_MANAGERS = {"full": Full, "summarize": Summarize, "cite_summary": CiteSummary}

__all__ = [
    "CONTEXT_MANAGERS",
    "ChatEncoder",
    "CiteSummary",
    "Context",
    "ContextManager",
    "Full",
    "Summarize",
]
