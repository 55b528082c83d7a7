"""The `dapo` answer rule: find the answer in a response and bring it to a comparable form.

The normalisation follows the description in arXiv 2206.14858 (Minerva), appendix D.1: keep the right side of an
assignment, drop the words and units around a value, write LaTeX shorthands in full, take commas out of numbers.
It is stricter where that procedure would make different answers equal: only whole words are dropped, an equation
is compared whole, only well-formed thousands lose their commas, and digits are never glued together.

Everything works on at most 300 characters, with patterns whose cost is at most quadratic in that.
"""

import re

MAX_ANSWER = 300
"""Characters at the end of a response in which the answer is looked for, and the longest gold answer."""

_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")

# Spellings that mean the same. A backslash before the macro would make it the end of a matrix row.
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[\u2212\u2013]", "-"),  # minus sign and dash
        (r"(?<!\\)\\\$", ""),  # money
        (r"(?<!\\)\\[()\[\]]|\$\$", "$"),  # the other ways to open and close mathematics
        (r"(?<!\\)\\!\s*|\{\}", ""),  # negative space, empty group
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![a-zA-Z]))|~", " "),
        (r"\{,\}", ","),
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[lc]?dots(?![a-zA-Z])|\u2026", "..."),
        (r"\\leq?(?![a-zA-Z])|\u2264", "<="),
        (r"\\geq?(?![a-zA-Z])|\u2265", ">="),
        (r"\\neq?(?![a-zA-Z])|\u2260", "!="),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\u00b0|\\?%", ""),
    )
)

_WRAPPERS = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|boxed|fbox)\s*\{")
_SYMBOL_UNITS = {"m", "s", "g", "h", "th", "st", "nd", "rd"}  # after a value and in \text{...}: else they are names
_UNITS = (
    r"square|units?|ways?|integers?|dollars?|cents?|miles?|mph|inch(?:es)?|feet|foot|ft|hours?|minutes?|seconds?|km|cm|mm|"
    r"kg|gm|met(?:er|re)s?|points?|digits?|degrees?|pounds?|meals?|edges?|students?|children|tickets?|multiples?|"
    r"percent(?:age)?|pct"
)
_VALUE_ENDS = (*"0123456789}$",)
# A unit takes its own exponent along: "15 cm^2" is 15, not 15^2.
_UNIT_WORDS = re.compile(rf"(?i)(?<![a-z\\])(?:{_UNITS})(?![a-z])(?:\s*\^\s*(?:[23]|\{{[23]\}}))?")
_ARTICLES = re.compile(r"(?i)(?<![a-z\\])(?:an?|the)\s+(?!and(?![a-z]))(?=[a-z]{2})")
_AND = re.compile(r"(?i)(?:,\s*)?(?<![a-z\\])and(?![a-z])")

_TRIVIA = ' \t\r\n*`",;:'  # around an answer: white space, emphasis, quotes, punctuation
# A value stands in mathematics (or a box) with only words around it.
_WORDS = r"""[^\W\d_]|[\s.,;:'"]"""
_VALUE_AMONG_WORDS = re.compile(rf"(?:{_WORDS})*\$([^$]*)\$(?:{_WORDS})*")
_REPEATED_SIGN = re.compile(r"\$(?:\s*\$)+")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
# What an answer may define: x, a_3, f(x), |AB|, (p,q).
_NAME = re.compile(r"\|?\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?\|?(?:\([a-zA-Z0-9,]*\))?|\([a-zA-Z](?:,[a-zA-Z])*\)")

_GROUPED = re.compile(r"([+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+))(\.[0-9]+)?")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")  # every space but those between two digits
_BARE_FRACTION = re.compile(r"\\frac(?:([0-9])|\{([^{}]*)\})(?:([0-9a-zA-Z])|\{([^{}]*)\})")
_BARE_ROOT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_SINGLE_SCRIPT = re.compile(r"([\^_])\{(\w)\}")
_NUMBER_FRACTION = re.compile(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}")


def extract_answer(response: str) -> str | None:
    """Return what follows the last "Answer:" within the last 300 characters, up to the end of its line, or None."""
    found = _ANSWER.findall(response[-MAX_ANSWER:])
    return found[-1].strip() if found else None


def equivalent(answer: str, gold: str) -> bool:
    """Whether an answer equals the gold answer; both have at most 300 characters, and an empty one equals nothing.

    Where the gold answer is a value, "m + n = 33" is judged by what follows its last "=". Where the gold answer is
    an equation, the whole equation counts: x^2 + y^2 = 1 is not x^2 - y^2 = 1.
    """
    found, expected = normalise(answer), normalise(gold)
    if not found or not expected:
        return False
    *left, value = _EQUALS.split(found)
    if left and not _EQUALS.search(expected):
        return normalise(value) == expected
    return found == expected


def normalise(answer: str) -> str:
    """Bring an answer of at most 300 characters to the form in which equal answers are equal strings.

    A number keeps no sign of being written differently: "+07", "7.0", "$7$", "x = 7" and "7 cm" all give "7". Text
    without content gives "".
    """
    for pattern, replacement in _SPELLINGS:
        answer = pattern.sub(replacement, answer)
    answer = _value_among_words(_unwrap(answer)).lstrip(_TRIVIA).rstrip(_TRIVIA + ".\\")
    answer = _ARTICLES.sub("", answer)
    answer = _UNIT_WORDS.sub("", answer).strip() or answer  # "square" alone is an answer, not a unit
    answer = _AND.sub(",", answer)
    answer = _compact(_defined_value(answer))
    return _canonical_number(answer) or _canonical_latex(answer)


def _unwrap(text: str) -> str:
    r"""Replace \text{...}, \boxed{...} and their like by their content; a box becomes mathematics, a unit nothing."""
    while match := _WRAPPERS.search(text):
        end = _closing_brace(text, match.end())
        content = text[match.end() : end]
        if "box" in match[0] and "mbox" not in match[0]:
            content = "$" + content.replace("$", "") + "$"
        elif content.strip() in _SYMBOL_UNITS and text[: match.start()].rstrip().endswith(_VALUE_ENDS):
            content = ""
        text = f"{text[: match.start()]} {content} {text[end + 1 :]}"
    return text


def _closing_brace(text: str, start: int) -> int:
    """Position of the brace that closes the one before `start`; the end of the text where it is missing."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _value_among_words(text: str) -> str:
    """The value where exactly one stands in mathematics and nothing but words around it; else without the signs."""
    match = _VALUE_AMONG_WORDS.fullmatch(_REPEATED_SIGN.sub("$", text))
    return match[1] if match else text.replace("$", "")


def _defined_value(text: str) -> str:
    """What "x = 11" or "f(x) = 11" defines; any other text stays whole."""
    name, *values = _EQUALS.split(text)
    return values[0] if len(values) == 1 and _NAME.fullmatch(_SPACE.sub("", name)) else text


def _compact(text: str) -> str:
    """Without white space, except between digits, and without the commas or spaces of thousands."""
    match = _GROUPED.fullmatch(text.strip())
    return re.sub("[, ]", "", match[1]) + (match[2] or "") if match else _SPACE.sub("", text)


def _canonical_number(text: str) -> str:
    """A decimal number in its shortest form, "" for anything else. Works on digits: no size is too large."""
    match = _NUMBER.fullmatch(text)
    if not match or not (match[2] or match[3]):
        return ""
    whole, decimals = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    value = f"{whole}.{decimals}" if decimals else whole
    return f"-{value}" if match[1] == "-" and value != "0" else value


def _canonical_latex(text: str) -> str:
    """LaTeX shorthands written in full; a fraction of two numbers as a/b."""
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _BARE_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _SINGLE_SCRIPT.sub(r"\1\2", text)
    match = _NUMBER_FRACTION.fullmatch(text)
    return f"{match[1]}{match[2]}/{match[3]}" if match else text
