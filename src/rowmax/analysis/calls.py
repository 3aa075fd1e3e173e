"""The table of which public call takes which argument, in the docs.

python -m rowmax.analysis.calls docs/arguments.md     writes it there
"""

import sys
from pathlib import Path

from rowmax.family import CALLS, keywords

BEGIN, END = "<!-- from the signatures: begin -->\n", "<!-- from the signatures: end -->"


def table() -> str:
    """In Markdown: a row for each argument, in the order in which calls name them."""
    takes = {call: keywords(call) for call in CALLS}
    rows = list(dict.fromkeys(name for names in takes.values() for name in names))
    lines = ["| | " + " | ".join(f"`{call}`" for call in CALLS) + " |", "|---" * (len(CALLS) + 1) + "|"]
    lines += [f"| `{name}` | " + " | ".join("x" if name in takes[call] else "" for call in CALLS) + " |" for name in rows]
    return "\n".join(lines) + "\n"


def put(text: str, begin: str, new: str, end: str) -> str:
    """A page's text with something new between two marks."""
    before, _, rest = text.partition(begin)
    return before + begin + new + end + rest.partition(end)[2]


def replaced(text: str) -> str:
    """The page's text with the table as it should be."""
    return put(text, BEGIN, table(), END)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replaced(path.read_text()))
