#!/usr/bin/env bash
# Prepare .venv in this folder with everything training needs. Safe to run again: it ends at once if
# there is nothing to do, and installs only into a .venv that it has created.
#
#   bash setup.sh          # what training needs
#   bash setup.sh --dev    # also what the tests and the lint need
#   bash setup.sh --check  # also check this machine; further arguments go to llm_demo.check
#
# PYTHON=python3.12   build .venv with this interpreter (default: the active environment's, else
#                     python3, else the newest of 3.10 to 3.13)
# TORCH_BUILD=cpu     cpu, cuda or rocm6.4 (or another ROCm), overriding detection
# SETUP_DRY_RUN=1     print decisions and commands, change nothing
#
# A PyTorch that the interpreter can already import is kept as it is, never replaced.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
OURS=$VENV/.made-by-setup-sh # empty if setup was interrupted
STAMP=$VENV/.setup-stamp     # a checksum of what setup depends on, then the installed extras
DRY_RUN=${SETUP_DRY_RUN:-}
PROBE_ROOT=${PROBE_ROOT:-} # tests fake other machines' /proc, /sys and /opt in this folder

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2 && exit 1; }
run() {
    printf '+ %s\n' "$*"
    [[ -n $DRY_RUN ]] || "$@"
}

if [[ ${1:-} == --check ]]; then
    trap 'exit 130' INT # set-up says why
    bash "${BASH_SOURCE[0]}" >&2 # standard output is for the check only
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    set -- "$VENV_PYTHON" -m llm_demo.check "${@:2}"
    if [[ -n $DRY_RUN ]]; then run "$@" >&2; else exec "$@"; fi
    exit
fi
trap 'printf "error: stopped by SIGINT; run it again to continue\n" >&2; exit 130' INT
[[ $# == 0 || $* == --dev ]] || die "unknown argument $1: setup.sh takes --dev, --check or nothing"
extras=${1:+dev}

# ---- anything to do? ---------------------------------------------------------------------------
fingerprint() {
    cat "$ROOT"/{setup.sh,requirements.txt,constraints.txt,pyproject.toml} "$VENV/pyvenv.cfg" | cksum
}
ready() {
    [[ -x $VENV_PYTHON && -f $STAMP && $(head -n 1 "$STAMP") == "$(fingerprint)" ]] &&
        [[ -z $extras || $(tail -n 1 "$STAMP") == "$extras" ]]
}
if ready; then
    say "$VENV is ready"
    exit
fi
[[ ! -e $VENV || -e $OURS ]] ||
    die "$VENV was not made by setup.sh, so it is left alone. Move it away; or install into it" \
        "yourself (a PyTorch for this machine first) by" \
        "DS_BUILD_OPS=0 '$VENV_PYTHON' -m pip install -e '$ROOT'" \
        "and start the launchers with PYTHON='$VENV_PYTHON'"
if [[ -z $DRY_RUN ]]; then
    (: >>"$ROOT/.venv.lock") 2>/dev/null ||
        die "cannot write to $ROOT, where .venv belongs: use a copy that you can write to, or start" \
            "the launchers with PYTHON=/path/to/python, an interpreter with the packages of" \
            "requirements.txt"
    exec 9>"$ROOT/.venv.lock" # nodes that share this folder may start at the same time
    flock 9 2>/dev/null || true
    if ready; then exit; fi
fi
if [[ -f $STAMP && -z $extras ]]; then extras=$(tail -n 1 "$STAMP"); fi

# ---- .venv, and an existing PyTorch ------------------------------------------------------------
suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}
torch_of() { # the version of this interpreter's torch as pip spells it, or nothing
    "$1" -c 'import importlib.metadata as m, torch; print(m.version("torch"))' 2>/dev/null || true
}
PATH=${PATH//"$VENV/bin:"/} # don't build .venv on itself if it is active
[[ ${VIRTUAL_ENV:-} != "$VENV" ]] || unset VIRTUAL_ENV
if [[ -n ${PYTHON:-} ]]; then
    suitable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10 to 3.13"
    base=$PYTHON
else
    for base in "${VIRTUAL_ENV:-/none}/bin/python" "${CONDA_PREFIX:-/none}/bin/python" \
        python3 python3.13 python3.12 python3.11 python3.10 ''; do
        if suitable "$base"; then break; fi
    done
    [[ -n $base ]] || die "found no Python 3.10 to 3.13: install one, or name one:" \
        "PYTHON=/path/to/python bash setup.sh"
fi
if [[ -s $OURS ]] && suitable "$VENV_PYTHON"; then
    torch=$(torch_of "$VENV_PYTHON")
    [[ -z $torch ]] || say "keeping torch $torch, which .venv has"
else
    torch=$(torch_of "$base")
    if [[ $torch == [01].* || $torch == 2.[0-7].* ]]; then
        say "not using torch $torch of $base, which is older than 2.8; it stays where it is"
        torch=
    elif [[ -n $torch ]]; then
        say "keeping torch $torch of $base: .venv uses its packages and changes none of them"
    fi
    "$base" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$base lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv), or" \
            "name another Python: PYTHON=/path/to/python bash setup.sh"
    say "creating $VENV with $("$base" -V)"
    [[ -n $DRY_RUN ]] || { rm -rf "$VENV" && mkdir "$VENV" && touch "$OURS"; }
    # Ctrl-C would show a traceback.
    run "$base" -m venv "$VENV" 2>/dev/null || die "$base -m venv $VENV fails: run it to see why"
    if [[ -n $torch && -z $DRY_RUN ]]; then
        # Not --system-site-packages: from a venv, it shows the packages of the underlying Python,
        # not the venv's own. These folders come last in sys.path, so .venv's packages win.
        "$base" -c 'if True:
            import sys
            for path in sys.path:
                if path.endswith(("site-packages", "dist-packages")):
                    print(f"import site; site.addsitedir({path!r})")' >"$VENV/inherited.pth"
        mv "$VENV/inherited.pth" "$VENV"/lib/python*/site-packages/
    fi
    [[ -n $DRY_RUN ]] || echo "$base" >"$OURS"
fi

# ---- else install PyTorch for this machine -----------------------------------------------------
# uv --torch-backend=auto is not enough for AMD: it needs rocm_agent_enumerator, which a machine with
# only the kernel driver lacks, and picks ROCm by GPU, not by the installed ROCm and driver.
BUILDS=$ROOT/llm_demo/machine/rocm_builds.txt
rocm_version() { # ROCm 7.14 and later have it below core
    local rocm=$PROBE_ROOT/opt/rocm
    { cat "$rocm"/.info/version "$rocm"/core{,-*}/.info/version 2>/dev/null || true; } |
        grep -m 1 . || echo unknown
}
amd_archs() { # from the kernel driver (90008 is gfx908, a CPU is 0), else from rocminfo
    cat "$PROBE_ROOT"/sys/class/kfd/kfd/topology/nodes/*/properties 2>/dev/null |
        awk '$1 == "gfx_target_version" && $2 {
            printf "gfx%d%x%x\n", $2 / 10000, $2 / 100 % 100, $2 % 100 }' | grep . ||
        rocminfo 2>/dev/null | grep -o 'gfx[0-9a-f]*' || true
}
choose_build() { # sets build and reason
    local arch have rocm
    build=cpu reason="no GPU was found that PyTorch supports"
    if nvidia-smi -L 2>/dev/null | grep -q GPU || [[ -e $PROBE_ROOT/proc/driver/nvidia/gpus ]]; then
        build=cuda reason="an NVIDIA GPU was found"
    fi
    for arch in $archs; do
        have=$(sed -n "/ $arch\b/s/ .*//p" "$BUILDS") # those with code for it, oldest first
        if [[ -z $have ]]; then # as for a laptop's integrated GPU: a ROCm build would crash there
            reason+="; its AMD $arch is not one that PyTorch's ROCm wheels are built for"
            continue
        fi
        rocm=$(rocm_version)
        reason="an AMD GPU was found ($arch, ROCm $rocm)"
        case $rocm. in # wheels include ROCm, which must match the installed driver
        6.3.* | 7.[012].*) build=rocm${rocm:0:3} ;;
        [7-9].* | [1-9][0-9].*) build=rocm7.2 ;;
        *) build=rocm6.4 ;;
        esac
        build=$(grep -x "$build" <<<"$have" || tail -n 1 <<<"$have")
        return
    done
}
pip=("$VENV_PYTHON" -m pip --disable-pip-version-check --no-input install)
install_torch() { # from pip's own sources, which may have the build; else uv knows where it is
    local uv=("$VENV/bin/uv" pip install --python "$VENV_PYTHON")
    [[ $build == cuda ]] || ! run "${pip[@]}" "torch==$release+$build" 2>/dev/null || return 0
    if run "${pip[@]}" uv; then
        run "${uv[@]}" --torch-backend="${build/cuda/auto}" "torch==$release" && return
    fi
    [[ $build != rocm* ]] ||
        die "found no torch $release for $build, and a CUDA build does not run here. Install a" \
            "ROCm build by hand, using the command of PyTorch's \"Get started\" page with" \
            "'$VENV_PYTHON' -m pip instead of pip; then run setup.sh again: it keeps that torch"
    say "found no $build build, trying pip's default torch, built for a recent CUDA: if it sees no" \
        "GPU, update the driver"
    run "${pip[@]}" "torch==$release"
}
if [[ -z $torch ]]; then
    archs=$(amd_archs | sort -u)
    if [[ -z ${TORCH_BUILD:-} ]]; then
        choose_build
    else
        [[ $TORCH_BUILD =~ ^(cpu|cuda|rocm[0-9]+\.[0-9]+)$ ]] ||
            die "TORCH_BUILD=$TORCH_BUILD: must be cpu, cuda, or rocm and a version as in rocm6.4"
        build=$TORCH_BUILD reason="TORCH_BUILD says so"
    fi
    read -r release has < <(sed -n "s/^$build //p" "$BUILDS") || true
    [[ ${release:-pinned} != pinned ]] || release=$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")
    for arch in $archs; do
        [[ $build != rocm* || " $has " == *" $arch "* ]] || reason+="; this build has no code for $arch"
    done
    say "PyTorch: torch $release, $build build: $reason"
    install_torch
elif [[ -n ${TORCH_BUILD:-} ]]; then
    say "TORCH_BUILD=$TORCH_BUILD has no effect, because torch is already there: to replace it, remove" \
        ".venv or deactivate the environment that has it"
fi

# ---- the rest, keeping torch and the numpy that came with it -----------------------------------
if [[ -z $DRY_RUN ]]; then
    torch=$(torch_of "$VENV_PYTHON")
    [[ -n $torch ]] || die "PyTorch does not start; see '$VENV_PYTHON' -c 'import torch'"
    pinned='^torch=='
    if compgen -G "$VENV/lib/python*/site-packages/inherited.pth" >/dev/null; then pinned='^(torch|numpy)=='; fi
    { grep -vE "$pinned" "$ROOT/constraints.txt" && echo "torch==$torch"; } >"$VENV/constraints.txt"
fi
with=$extras
if [[ $extras == dev && $torch == *+cpu ]]; then with+=,triton; fi # other builds bring their own
run "${pip[@]}" 'setuptools>=77'
# DeepSpeed comes as source. pip's isolated build would lack torch, or install another one.
run env DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation -c "$VENV/constraints.txt" \
    -e "$ROOT${with:+[$with]}"
if [[ -z $DRY_RUN ]]; then
    { fingerprint && echo "$extras"; } >"$STAMP"
    say "$VENV is ready: torch $torch"
fi
