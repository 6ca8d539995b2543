"""Text from outside as it may be shown: on one line, of a bearable length, without control codes.

A file name or a value in a recipe may hold anything, even bytes that are no text, or the codes by
which a program talks to a terminal.
"""

SHORT = 80
"""Letters of a value that a sentence repeats at most."""


def printable(text: str) -> str:
    """``text`` with everything that cannot be printed, such as a line's end, escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def shortened(value: object, letters: int = SHORT) -> str:
    """How Python writes ``value``, the middle left out where that is long."""
    text = printable(repr(value))
    if len(text) <= letters:
        return text
    half = (letters - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _escaped(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # how Python keeps a byte of a file name that is no text
        return f"\\x{ord(char) - 0xDC00:x}"
    return char.encode("unicode_escape").decode()
