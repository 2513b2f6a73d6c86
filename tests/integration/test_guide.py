"""The program of docs/guide.md runs on two ranks and gives what the guide says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")

EXPECT = """
def _expect(got, said):
    if comm.rank == 0 and repr(got) != said:
        raise SystemExit(f"the guide says {said}, it is {got!r}")
"""


def program() -> str:
    """Return the pieces of code of the section as one program that checks what they give."""
    section = GUIDE.split("## The Python surface\n")[1].split("\n## ")[0]
    code = "".join(re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))
    return EXPECT + re.sub(
        r"^( *)(\S.*)  # → (.*)$",
        lambda line: f"{line[1]}_expect(({line[2]}), {line[3]!r})",
        code,
        flags=re.MULTILINE,
    )


def test_the_guide_is_true(tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    script.write_text(program(), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "allreduced.cli.main", "run"),
        *("--ranks-per-node", "2", "--", sys.executable, str(script)),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ALLREDUCED_")}
    ended = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, textwrap.indent(ended.stdout + ended.stderr, "  ")
