"""Errors of the residency layer. Each message is one line that names the wrong value and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ziggurat.residency.budget_plan import Plan

__all__ = ["BudgetError", "ConfigError", "ResidencyError"]


class ResidencyError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(ResidencyError):
    """A configuration that cannot be used.

    `problems` holds one line per mistake; the message is these lines joined by newlines, so that a
    configuration with one mistake gives one line.
    """

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise ValueError("a ConfigError needs at least one problem")
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, ...]]:
        return (type(self), self.problems)


class BudgetError(ResidencyError):
    """A plan that cannot work on this machine; the message names the short number and the key to change.

    `plan` is the whole plan with every check, for callers that want to print it.
    """

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, Plan]]:
        return (type(self), (str(self), self.plan))
