"""Says, before anything is installed, what this machine lacks. Uses the standard library only."""

import shutil
import sys
import sysconfig
from pathlib import Path

problems = []
if sys.version_info < (3, 11):
    problems.append(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
try:
    import ensurepip  # noqa: F401
except ImportError:
    problems.append("the venv module lacks ensurepip: apt-get install python3-venv")
if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
    problems.append("Python's C headers are missing: apt-get install python3-dev")
if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
    problems.append("a C++ compiler is missing: apt-get install g++")
if problems:
    sys.exit("voltapile cannot be built here:\n  " + "\n  ".join(problems))
