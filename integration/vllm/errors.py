"""Errors of the vLLM plugin."""


class IntegrationError(Exception):
    """Base of every refusal that concerns how Ziggurat and vLLM meet."""


class UnsupportedVllmError(IntegrationError):
    """The installed vLLM lacks a hook, or is a version nobody tried."""


class UnsupportedFeatureError(IntegrationError):
    """A vLLM feature was asked for that conflicts with tiered experts."""


class SetupError(IntegrationError):
    """Load format, configuration and model do not fit together."""
