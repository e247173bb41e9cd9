#!/usr/bin/env bash
# Fine-tune with a whole copy of the model on each GPU, as DDP does, or on 2 CPU processes without
# GPUs: fsdp/train_fsdp.py with other settings.
#
#   bash fsdp/launch_ddp.sh                            # the bundled small model and data
#   bash fsdp/launch_ddp.sh --train_json my.jsonl      # its flags: --help
#   MODEL=Qwen/Qwen3-0.6B PSGD_RANK=32 bash fsdp/launch_ddp.sh  # compressed, for slow links
#
# A flag beats the environment, which beats the defaults below. An empty one is left to the script,
# or to llm_demo/launch/settings.py for the bundled model and data. More is in docs/running.md.
# shellcheck source=launch_common.sh disable=SC2034 # which reads the settings by name
source "$(dirname "${BASH_SOURCE[0]}")/../launch_common.sh"

MODEL=${MODEL-$ROOT/models/qwen3-tiny} # Hugging Face folder or hub id
TRAIN_JSON=${TRAIN_JSON-$ROOT/data/first_run.jsonl}
SEQ_LEN=${SEQ_LEN-} # tokens per row
# rows per optimizer step = processes x MICRO_BATCH_SIZE x GRAD_ACCUM_STEPS; for the bundled model
# and data 16 on any number of processes, unless the environment or a flag sets one of these
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE-4}
GRAD_ACCUM_STEPS=${GRAD_ACCUM_STEPS-2}
MAX_STEPS=${MAX_STEPS-}   # optimizer steps
NUM_EPOCHS=${NUM_EPOCHS-} # or passes over the data; default: for about 100 steps
LR=${LR-}
DTYPE=${DTYPE-} # auto, fp32, bf16, fp16
USE_ACTIVATION_CHECKPOINTING=${USE_ACTIVATION_CHECKPOINTING-} # less memory, more compute
OUTPUT_DIR=${OUTPUT_DIR-} # the folder of the run
SAVE_EVERY=${SAVE_EVERY-} # steps between checkpoints, besides the one at the end
RESUME=${RESUME-}         # auto: resume in OUTPUT_DIR if there is a checkpoint
REPLICAS=${REPLICAS-all}  # copies of the model; if fewer than processes, each is sharded
PSGD_RANK=${PSGD_RANK-0}  # rank of compressed gradients, approximate; 0: exact
launch fsdp/train_fsdp.py "$@"
