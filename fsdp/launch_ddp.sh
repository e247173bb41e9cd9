#!/usr/bin/env bash
# Fine-tune with a whole copy of the model on each GPU, as DDP does, or on 2 CPU processes without
# GPUs: fsdp/train_fsdp.py with other settings. The first run prepares .venv. Works from any folder;
# relative paths are relative to yours.
#
#   bash fsdp/launch_ddp.sh                                  # the bundled small model and data
#   bash fsdp/launch_ddp.sh --train_json my.jsonl --lr 2e-5  # flags go to fsdp/train_fsdp.py
#   MODEL=Qwen/Qwen3-0.6B PSGD_RANK=32 bash fsdp/launch_ddp.sh  # compressed, for slow links
#   bash fsdp/launch_ddp.sh --help                           # every flag
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash fsdp/launch_ddp.sh --output_dir /shared/run
#                                # and with NODE_RANK=1 on the other node
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
# rows per optimizer step = processes x MICRO_BATCH_SIZE x GRAD_ACCUM_STEPS
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE-4}
GRAD_ACCUM_STEPS=${GRAD_ACCUM_STEPS-2}
MAX_STEPS=${MAX_STEPS-}   # optimizer steps
NUM_EPOCHS=${NUM_EPOCHS-} # or passes over the data; default: one pass
LR=${LR-}
DTYPE=${DTYPE-} # auto, fp32, bf16, fp16
USE_ACTIVATION_CHECKPOINTING=${USE_ACTIVATION_CHECKPOINTING-} # less memory, more compute
OUTPUT_DIR=${OUTPUT_DIR-} # the folder of the run
SAVE_EVERY=${SAVE_EVERY-} # steps between checkpoints, besides the one at the end
RESUME=${RESUME-}         # auto: resume in OUTPUT_DIR if there is a checkpoint
REPLICAS=${REPLICAS-all}  # copies of the model; if fewer than processes, each is sharded
PSGD_RANK=${PSGD_RANK-0}  # rank of compressed gradients, approximate; 0: exact
# With the bundled model and data, llm_demo/launch/settings.py fills SEQ_LEN, MAX_STEPS, LR and
# LOG_EVERY if they are empty.
# --------------------------------------------------------------------------------------------------
launch torchrun "$ROOT/fsdp/train_fsdp.py" "$@"
