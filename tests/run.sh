#!/usr/bin/env bash
# Install what the tests need and run them; arguments go to pytest: bash tests/run.sh -k packing -x
# PYTHON=... takes that interpreter as it is instead of preparing .venv.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    bash "$ROOT/setup.sh" --dev
    PYTHON=$ROOT/.venv/bin/python
fi
cd "$ROOT"
exec "$PYTHON" -m pytest tests "$@"
