"""What may be shown of text that came from outside."""

from hypothesis import given, settings
from hypothesis import strategies as st

from xmoco.text import printable, shortened


@given(st.text())
def test_printable_text_stays_and_the_rest_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
    assert printable(shown) == shown


@settings(max_examples=40)
@given(st.recursive(st.text() | st.integers(), st.lists), st.integers(3, 200))
def test_no_value_is_shown_at_length(value: object, letters: int) -> None:
    shown = shortened(value, letters)
    assert shown.isprintable()
    assert len(shown) <= letters
    assert shown == repr(value) or "…" in shown or not repr(value).isprintable()
