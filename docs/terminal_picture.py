"""Turns a terminal's screen into an SVG picture for the docs.

tmux new-session -d -s picture -x 100 -y 24 'make train; sleep 60'
tmux capture-pane -t picture -e -p | python docs/terminal_picture.py docs/images/train.svg
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main() -> None:
    """Read a screen from standard input and write the picture named by the first argument."""
    screen = sys.stdin.read().rstrip()
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen))
    picture = console.export_svg(title="make train")
    # The picture must not load fonts from elsewhere: any monospaced font will do.
    Path(sys.argv[1]).write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
