#!/usr/bin/env bash
# Fine-tune with a DeepSpeed pipeline on this machine's GPUs, or on 2 CPU processes without any:
# 2 stages, and as many replicas of them as there are pairs of processes. The first run prepares
# .venv. Works from any folder; relative paths are relative to yours.
#
#   bash pp/launch_pp.sh                                  # the bundled small model and data
#   bash pp/launch_pp.sh --train_json my.jsonl --lr 2e-5  # flags go to pp/pp_train.py
#   MODEL=Qwen/Qwen3-0.6B SEQ_LEN=2048 NPROC_PER_NODE=2 bash pp/launch_pp.sh
#   bash pp/launch_pp.sh --help                           # every flag
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash pp/launch_pp.sh --output_dir /shared/run
#                                # and the same with NODE_RANK=1 there
#
# A flag beats the environment, which beats the settings below. PYTHON=... uses that interpreter
# instead of .venv.
# shellcheck disable=SC2034 # the settings are read by name, in launch_common.sh
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ---- settings; an empty one leaves the choice to the script ------------------------------------
MODEL=${MODEL-$ROOT/models/qwen3-tiny} # Hugging Face folder or hub id
TRAIN_JSON=${TRAIN_JSON-$ROOT/data/first_run.jsonl}
EVAL_JSON=${EVAL_JSON-}   # empty: X.heldout.jsonl beside X.jsonl, if there is one
INPUT_KEY=${INPUT_KEY-}   # names of the prompt's and the answer's column, where they have
TARGET_KEY=${TARGET_KEY-} # unusual ones
SEQ_LEN=${SEQ_LEN-}       # token slots of a row
# rows of an optimizer step = processes / STAGES x MICRO_BATCH_SIZE x GRAD_ACCUM_STEPS; with few
# micro-batches the stages wait for one another
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE-4}
GRAD_ACCUM_STEPS=${GRAD_ACCUM_STEPS-4}
MAX_STEPS=${MAX_STEPS-}   # optimizer steps
NUM_EPOCHS=${NUM_EPOCHS-} # or passes over the data; with neither: one
LR=${LR-}
WEIGHT_DECAY=${WEIGHT_DECAY-}
WARMUP_STEPS=${WARMUP_STEPS-}
LR_SCHEDULER=${LR_SCHEDULER-} # cosine, linear, constant
MAX_GRAD_NORM=${MAX_GRAD_NORM-}
DTYPE=${DTYPE-} # auto, fp32, bf16, fp16
PACK_SEQUENCES=${PACK_SEQUENCES-}
TRAIN_ON_PROMPT=${TRAIN_ON_PROMPT-}
USE_ACTIVATION_CHECKPOINTING=${USE_ACTIVATION_CHECKPOINTING-}
ATTN_IMPL=${ATTN_IMPL-}
COMPILE=${COMPILE-} # true, false
SEED=${SEED-}
LOG_EVERY=${LOG_EVERY-}
EVAL_EVERY=${EVAL_EVERY-}
EVAL_BATCH_SIZE=${EVAL_BATCH_SIZE-}
OUTPUT_DIR=${OUTPUT_DIR-} # the run's folder
SAVE_EVERY=${SAVE_EVERY-} # steps between checkpoints; there is one at the end in any case
KEEP_LAST=${KEEP_LAST-}   # checkpoints to keep
RESUME=${RESUME-}         # auto: go on in OUTPUT_DIR, if there is something to go on from
REPORT_TO=${REPORT_TO-}   # tensorboard, wandb
TOKENIZER_NAME_OR_PATH=${TOKENIZER_NAME_OR_PATH-} # where it is not the model's own
DATA_FORMAT=${DATA_FORMAT-}
OVERLONG=${OVERLONG-} # documents longer than SEQ_LEN: truncate, split, drop
SAMPLE_TOKENS=${SAMPLE_TOKENS-}
OVERWRITE=${OVERWRITE-}
DRY_RUN=${DRY_RUN-}
STAGES=${STAGES-}         # default 2
SCHEDULE=${SCHEDULE-} # 1f1b, dualpipev
PARTITION=${PARTITION-}   # balanced, uniform, parameters, or the blocks of each piece: "18,10"
DEEPSPEED_CONFIG=${DEEPSPEED_CONFIG-} # the engine's switches; default pp/ds_pp_2gpus.json
CHECK_TIED_EVERY=${CHECK_TIED_EVERY-} # steps between checks that tied copies are equal
# Only with the bundled model and data, for those of the settings above that are empty:
FIRST_RUN="SEQ_LEN=64 MAX_STEPS=220 LR=2e-3 LOG_EVERY=10"
# --------------------------------------------------------------------------------------------------
source "$ROOT/launch_common.sh"
launch deepspeed "$ROOT/pp/pp_train.py" "STAGES SCHEDULE PARTITION DEEPSPEED_CONFIG CHECK_TIED_EVERY" "$@"
