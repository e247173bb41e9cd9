# shellcheck shell=bash
# Sourced by the launchers before their settings. launch() starts a training script;
# llm_demo/launch/settings.py turns settings and environment into flags.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
trap 'echo "error: stopped by SIGINT" >&2; exit 130' INT
before=$(compgen -v) # the variables defined before a launcher's settings

launch() { # SCRIPT [flags of the command line]
    local script=$ROOT/$1 name settings=() find why
    shift
    for name in $(compgen -v | grep '^[A-Z]'); do
        [[ $'\n'$before$'\n' == *$'\n'"$name"$'\n'* ]] || settings+=("$name=${!name}")
    done
    if [[ -z ${PYTHON:-} ]]; then
        trap 'exit 130' INT # setup.sh prints why
        bash "$ROOT/setup.sh"
        PYTHON=$ROOT/.venv/bin/python
    else
        # Ignores Ctrl-C, which would print a traceback here; the trap handles it afterwards.
        find='import importlib.util as u; print(u.find_spec("torch") and "has torch")'
        if [[ $(trap '' INT && "$PYTHON" -c "$find" 2>/dev/null) != *"has torch" ]]; then
            why=$("$PYTHON" -c "$find" 2>&1 >/dev/null | grep 'rror: ' | tr '\n' ' ' || true)
            if [[ $why ]]; then
                echo "error: PYTHON=$PYTHON does not start: $why" >&2
            else
                echo "error: PYTHON=$PYTHON is not a Python with torch: name one, install torch" \
                    "there, or unset PYTHON to use .venv" >&2
            fi
            exit 2
        fi
    fi
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONUTF8=1 # paths and consoles are UTF-8, whatever the locale
    set -- "$PYTHON" -m llm_demo.launch --settings "${settings[@]}" -- "$script" "$@"
    # Ctrl-C would print a traceback while Python starts: block it if env can, until it is handled.
    if env --block-signal=INT true 2>/dev/null; then set -- env --block-signal=INT "$@"; fi
    exec "$@"
}
