"""What the command line itself refuses."""


class CliError(Exception):
    """A wrong use of a command; the message is one line."""
