#!/usr/bin/env bash
# Fine-tune in a pipeline whose stages are sharded with FSDP2, on this machine's GPUs, or on 2 CPU
# processes without GPUs: 2 stages, each sharded over half of the processes. The first run prepares
# .venv. Works from any folder; relative paths are relative to yours.
#
#   bash fsdp_pp/launch_fsdp_pp.sh                             # the bundled small model and data
#   bash fsdp_pp/launch_fsdp_pp.sh --train_json my.jsonl       # flags go to train_fsdp_pp.py
#   MODEL=Qwen/Qwen3-0.6B SEQ_LEN=2048 bash fsdp_pp/launch_fsdp_pp.sh
#   bash fsdp_pp/launch_fsdp_pp.sh --help                      # every flag
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash fsdp_pp/launch_fsdp_pp.sh --output_dir /shared/run
#                                # a stage per node; and with NODE_RANK=1 on the other node
#
# A flag beats the environment, which beats the settings below; docs/flags.md lists all flags.
# PYTHON=... uses that interpreter instead of .venv.
# shellcheck disable=SC2034 # the settings are read by name, in launch_common.sh
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/launch_common.sh"

# ---- settings; empty: the script decides, see docs/flags.md ------------------------------------
MODEL=${MODEL-$ROOT/models/qwen3-tiny} # Hugging Face folder or hub id
TRAIN_JSON=${TRAIN_JSON-$ROOT/data/first_run.jsonl}
SEQ_LEN=${SEQ_LEN-} # tokens per row
# rows per optimizer step = processes / STAGES x MICRO_BATCH_SIZE x GRAD_ACCUM_STEPS; with few
# micro-batches the stages wait for one another
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE-4}
GRAD_ACCUM_STEPS=${GRAD_ACCUM_STEPS-4}
MAX_STEPS=${MAX_STEPS-}   # optimizer steps
NUM_EPOCHS=${NUM_EPOCHS-} # or passes over the data; default: one pass
LR=${LR-}
DTYPE=${DTYPE-} # auto, fp32, bf16, fp16
USE_ACTIVATION_CHECKPOINTING=${USE_ACTIVATION_CHECKPOINTING-} # less memory, more compute
OUTPUT_DIR=${OUTPUT_DIR-} # the folder of the run
SAVE_EVERY=${SAVE_EVERY-} # steps between checkpoints, besides the one at the end
RESUME=${RESUME-}         # auto: resume in OUTPUT_DIR if there is a checkpoint
STAGES=${STAGES-}       # pipeline stages; default 2
PARTITION=${PARTITION-} # balanced, uniform, parameters, or the blocks of each piece: 18,10
SCHEDULE=${SCHEDULE-}   # 1f1b, gpipe, interleaved, v
# With the bundled model and data, llm_demo/launch/settings.py fills SEQ_LEN, MAX_STEPS, LR and
# LOG_EVERY if they are empty.
# --------------------------------------------------------------------------------------------------
launch torchrun "$ROOT/fsdp_pp/train_fsdp_pp.py" "$@"
