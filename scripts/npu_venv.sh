#!/usr/bin/env bash
# Make a Python environment beside that of scripts/setup.sh, with more packages of Ascend's line, or check it (two seconds).
#
#   bash scripts/npu_venv.sh [--a3] [--venv DIR]
#
#   --venv DIR   the environment of scripts/setup.sh (default: .venv)
#   --a3         make DIR.a3: torch 2.5.1 and the other packages of line a3's image that DIR lacks, to run tests (1 GB to download)
#
# Without --a3 it makes DIR.npu, which imports the real torch_npu (44 MB to download) without CANN and without an NPU; only fake
# tensors exist there: see tests/npu/answers.c. gcc compiles stand-ins for missing libraries (CANN, or CUDA for --a3). All other
# packages are those of DIR, which is not changed. Prints the command to run Python in the environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
base=$root/.venv kind=npu package=torch-npu module=torch_npu
say() { printf '[npu_venv %3ss] %s\n' "$SECONDS" "$*" >&2; }
die() { printf '[npu_venv] error: %s\n' "$*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --a3) kind=a3 package=torch module=torch; shift ;;
        --venv) [ $# -ge 2 ] || die "--venv needs a folder"; base=$2; shift 2 ;;
        *) die "unknown option $1; see --help" ;;
    esac
done
[ -f "$base/pyvenv.cfg" ] || die "$base is not a Python environment; make one with: bash scripts/setup.sh --venv $base"
base=$(cd "$base" && pwd -P)
venv=$base.$kind stubs=$base.$kind/stubs stamp=$base.$kind/stubs/.finished pins=$root/configs/requirements-npu-stubs.txt
if [ "$kind" = a3 ]; then
    pins=$venv.pins
    "$base/bin/python" -I - "$root/scripts" >"$pins" <<'END' || die "$base is not ready; run: bash scripts/setup.sh --venv $base"
import sys
from importlib import metadata
sys.path.insert(0, sys.argv[1])
import lock_a3
have = {lock_a3.canonicalize_name(found.metadata["Name"]): found.version.partition("+")[0] for found in metadata.distributions()}
for name, version in lock_a3.locked_versions("3.11").items():
    if have.get(name) != version and name != "torch-npu": # the emulated platform refuses it
        print(f"{name}=={version}")
END
fi
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # else torch imports torch_npu, which needs the stubs first
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIREMENT

sources=("$root/tests/npu/make_stubs.py" "$root"/tests/npu/*answers.c "$pins")
made_from() { cat "${sources[@]}" | sha256sum; "$base/bin/python" -I -c 'import sys, torch; print(sys.version, torch.__version__)'; }
check() { "$venv/bin/python" -I "$root/scripts/check_env.py" "$pins"; }
usable() { LD_LIBRARY_PATH=$stubs TASK_QUEUE_ENABLE=0 "$venv/bin/python" -I -c "import $module" 2>&1; }

if command -v flock >/dev/null; then exec 9>"$venv.lock"; flock 9; fi
made=$(made_from) || die "$base cannot import torch; run: bash scripts/setup.sh --venv $base"
if [ "$(cat "$stamp" 2>/dev/null)" != "$made" ] || ! check >/dev/null; then
    [ ! -e "$venv" ] || [ -f "$venv/pyvenv.cfg" ] || die "$venv exists and is not a Python environment; move it"
    rm -rf "$venv"
    say "making $venv"
    "$base/bin/python" -I -m venv --without-pip "$venv"
    site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
    torch=$(check | grep -E '^missing (torch|numpy)==' || true)
    [ "$kind" = a3 ] || [ -z "$torch" ] || die "$base differs from $pins: $torch; run: bash scripts/setup.sh --venv $base"
    # this pip is the base's, too; it changes nothing outside of $venv
    "$venv/bin/python" -I -m pip --disable-pip-version-check --no-input install -q --no-deps --no-warn-script-location -r "$pins" ||
        die "pip could not install $package (its error is above); check the network and the index (PIP_INDEX_URL), and run this again"
    check >&2 || die "$venv differs from $pins (above); remove $venv and run this again"
    made_stubs=$("$venv/bin/python" -I "$root/tests/npu/make_stubs.py" "$stubs" "$package") || exit 1 # make_stubs.py printed the reason
    say "stand-ins: $made_stubs"
    error=$(usable) || die "$module cannot be imported: $(tail -n 1 <<<"$error")"
    printf '%s\n' "$made" >"$stamp"
    say "ready: $venv ($(du -sm "$venv" | cut -f1) MB)"
fi
echo "LD_LIBRARY_PATH=$stubs TORCH_DEVICE_BACKEND_AUTOLOAD=0 TASK_QUEUE_ENABLE=0 $venv/bin/python"
