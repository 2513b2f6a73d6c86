#!/bin/sh
# Make the virtual environment $1 with `pip` in it, and see that what a build needs is there (Python headers, a C++
# compiler). What is missing is installed with apt where that is permitted, else named with the command that mends it.
set -eu
venv=$1

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=${PYTHON:-}
if [ -n "$python" ]; then
  good_python "$python" || { echo "PYTHON=$python is not Python 3.11 or newer" >&2; exit 2; }
else
  for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
    if good_python "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || { echo "Python 3.11 or newer is needed: apt-get install python3" >&2; exit 2; }
fi

# Debian's packages are named after its own Python 3; those of another version after that version.
version_of() { "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' 2>/dev/null; }
package=python3
[ "$(version_of "$python")" = "$(version_of python3)" ] || package=$(version_of "$python")

missing=
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing $package-venv"
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
  || missing="$missing $package-dev"
command -v g++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || missing="$missing g++"
if [ -n "$missing" ]; then
  as_root=
  [ "$(id -u)" = 0 ] || as_root="sudo -n"
  if command -v apt-get >/dev/null 2>&1 && $as_root true 2>/dev/null; then
    echo "installing$missing" >&2
    $as_root apt-get update -q >&2
    # shellcheck disable=SC2086 # a list of package names
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing >&2
  else
    echo "these packages are needed to build:$missing" >&2
    echo "install them, for example: sudo apt-get install$missing" >&2
    exit 2
  fi
fi

# One that was interrupted while it was made has no pip.
if ! good_python "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear "$venv"
fi
