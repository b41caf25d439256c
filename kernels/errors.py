"""Errors of the codecs: bad sizes, unknown names, weights that cannot be packed."""


class CodecError(ValueError):
    """A codec cannot do what was asked; the message names the wrong value and what would be right."""


class NonFiniteWeightError(CodecError):
    """A checkpoint tensor holds a NaN or an infinity, in its elements or in its scales.

    Attributes:
        tensor: name of the tensor.
        detail: which part of it is not finite.
    """

    def __init__(self, tensor: str, detail: str) -> None:
        super().__init__(f"tensor {tensor}: {detail}; the checkpoint is damaged, fetch it again")
        self.tensor = tensor
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.tensor, self.detail)  # so that it can cross to another process


class WeightRangeError(CodecError):
    """A finite checkpoint value becomes infinite in the codec's number range.

    Attributes:
        tensor: name of the tensor.
        detail: the value and the range it leaves.
    """

    def __init__(self, tensor: str, detail: str) -> None:
        super().__init__(f"tensor {tensor}: {detail}")
        self.tensor = tensor
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.tensor, self.detail)  # so that it can cross to another process
