#!/usr/bin/env bash
# Measure one GPU: the plain model against FSDP2 and torchtitan, and the speed of
# `python -m llm_demo.evaluate`. Each part takes at most ten minutes:
#
#   bash bench/one_gpu.sh OUT steps                                      9 min: the preset one_gpu
#   bash bench/one_gpu.sh OUT answers ROWS.jsonl TOKENIZER_FOLDER        3 min
#   bash bench/one_gpu.sh OUT tests                                      2 min
#
# Results and logs go to OUT, the rows to OUT/one_gpu.jsonl. MODEL, ROWS, NEW_TOKENS, PRESET and
# ONLY reduce the work.
set -uo pipefail
OUT=$(mkdir -p "$1" && cd "$1" && pwd) PART=$2 DATA=${3:-} TOKENIZER=${4:-}
MODEL=${MODEL:-models/qwen3-0.6b} ROWS=${ROWS:-1319} NEW_TOKENS=${NEW_TOKENS:-256}
PRESET=${PRESET:-one_gpu}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHON=${PYTHON:-python3} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}

step() { # name, seconds, command: output goes to a log, status and time to steps.txt
    local name=$1 limit=$2 started=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "$name: status $?, $((SECONDS - started)) s" | tee -a "$OUT/steps.txt"
}

if [[ $PART == tests ]]; then
    step gpu_tests 300 "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_one_process.py \
        tests/test_answers.py tests/test_rotary.py
    tail -15 "$OUT/gpu_tests.log"
elif [[ $PART == steps ]]; then
    step steps 590 "$PYTHON" -m bench.run --preset "$PRESET" --only "${ONLY:-}" \
        --out "$OUT/$PRESET" --overwrite --timeout 200
    cat "$OUT/steps.log"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # random weights almost never stop, so answers have the full length
    "$PYTHON" - "$MODEL" "$TOKENIZER" "$work/model" <<'EOF' || exit 1
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
model, tokenizer, out = sys.argv[1:]
torch.manual_seed(0)
config = AutoConfig.from_pretrained(model)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)
EOF
    head -n "$ROWS" "$DATA" >"$work/rows.jsonl"
    evaluate() { # name, limit, flags
        step "$1" "$2" "$PYTHON" -m llm_demo.evaluate --models "$work/model" --out "$OUT/$1" \
            --data "$work/rows.jsonl" --input_key question --target_key answer \
            --answer_regex '#### (-?[\d,.]+)' "${@:3}"
        grep -E ' in [0-9.]+ s$|error' "$OUT/$1.log"
    }
    evaluate all 250 --max_new_tokens "$NEW_TOKENS"
    few=(--rows 64 --show 64 --max_new_tokens $((NEW_TOKENS / 4)) --dtype bf16)
    evaluate padded 100 "${few[@]}"
    evaluate alone 200 "${few[@]}" --batch_size 1
    "$PYTHON" - "$OUT" <<'EOF' | tee "$OUT/agreement.txt"
import json, sys
def answers(name):
    try:
        found = json.load(open(f"{sys.argv[1]}/{name}/evaluation.json"))["models"][0]["files"][0]
    except FileNotFoundError:
        return []
    return [answer["answer"] for answer in found["answers"]]
same = [a == b for a, b in zip(answers("padded"), answers("alone"))]
print(f"padded and alone: {sum(same)} of {len(same)} answers are the same")
EOF
fi
