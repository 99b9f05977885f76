"""How texts are spelled: those that are numbers, and variants of one text."""

import re
from collections.abc import Iterable, Sequence

DECIMAL = {".": ",", ",": "."}  # separator of thousands -> decimal mark
_NUMBERS = {
    mark: re.compile(rf"[-+]?(\d+|\d{{1,3}}({re.escape(mark)}\d{{3}})+)({re.escape(decimal)}\d+)?")
    for mark, decimal in DECIMAL.items()
}

_AROUND = re.compile(r"\s*[%‰$€£¥]\s*|(?<=\d)[\s'’](?=\d{3}(?:\D|$))")


def has_decimal_commas(texts: Sequence[str]) -> bool:
    """Whether all texts are numbers if the comma is the decimal mark, which at least one has.

    >>> has_decimal_commas(["1,5", "-3"]), has_decimal_commas(["1,5", "1,5 kg"]), has_decimal_commas(["2", "3"])
    (True, False, False)
    """
    return any("," in text for text in texts) and all(is_number(pointed(text)) for text in texts)


def separator_of(texts: Sequence[str]) -> str:
    """What separates thousands, if all texts are numbers, at least one of them with it; else empty.

    Commas that may be decimal commas are none.

    >>> separator_of(["1.234,5", "3"]), separator_of(["1,234,567", "0.5"]), separator_of(["1,234"])
    ('.', ',', '')
    """
    for mark in DECIMAL:
        if any(mark in text for text in texts) and are_separated(texts, mark):
            return "" if mark == "," and has_decimal_commas(texts) else mark
    return ""


def are_separated(texts: Iterable[str], mark: str) -> bool:
    """Whether all texts are numbers if a mark, and nothing else, separates thousands.

    >>> are_separated(["1.234,5", "3"], "."), are_separated(["1.5"], ".")
    (True, False)
    """
    return all(_NUMBERS[mark].fullmatch(text) for text in texts)


def are_marked(texts: Sequence[str]) -> bool:
    """Whether all texts are numbers, at least one of them with signs around or white space in it.

    >>> are_marked(["12.5%", "3%"]), are_marked(["$3.50", "(12)"]), are_marked(["5 kg"]), are_marked(["3"])
    (True, True, False, False)
    """
    known = [bare(text) for text in texts]
    return known != [*texts] and (all(map(is_number, known)) or has_decimal_commas(known) or bool(separator_of(known)))


def bare(text: str) -> str:
    """A number without signs of percent or currency, parentheses for minus, and spaces or apostrophes of thousands.

    >>> bare("12.5 %"), bare("($1,234)"), bare("1 234"), bare("a b")
    ('12.5', '-1,234', '1234', 'a b')
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if re.fullmatch(r"\([^-()]+\)", text):
        text = f"-{text[1:-1]}"
    return _AROUND.sub("", text)


def pointed(text: str) -> str:
    """A text with decimal points for decimal commas.

    >>> pointed("-1,5")
    '-1.5'
    """
    return text.replace(",", ".")


def is_number(text: str) -> bool:
    """Whether a text is a number.

    >>> is_number("1.5e3"), is_number("?")
    (True, False)
    """
    try:
        float(text)
    except ValueError:
        return False
    return True


def variants(texts: Iterable[str]) -> list[list[str]]:
    """Groups of different texts that are equal but for upper and lower case and white space.

    >>> variants(["Oslo", "Rome", "oslo "])
    [['Oslo', 'oslo ']]
    """
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(" ".join(text.split()).casefold(), []).append(text)
    return [group for group in groups.values() if len(group) > 1]
