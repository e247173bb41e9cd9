#!/usr/bin/env bash
# Fine-tune in a pipeline whose stages are sharded with FSDP2, on this machine's GPUs, or on 2 CPU
# processes without GPUs: 2 stages, each sharded over half of the processes.
#
#   bash fsdp_pp/launch_fsdp_pp.sh                            # the bundled small model and data
#   bash fsdp_pp/launch_fsdp_pp.sh --train_json my.jsonl      # its flags: --help
#   MODEL=Qwen/Qwen3-0.6B SEQ_LEN=2048 NPROC_PER_NODE=2 bash fsdp_pp/launch_fsdp_pp.sh
#
# A flag beats the environment, which beats the defaults below. An empty one is left to the script,
# or to llm_demo/launch/settings.py for the bundled model and data. More is in docs/running.md.
# shellcheck source=launch_common.sh disable=SC2034 # which reads the settings by name
source "$(dirname "${BASH_SOURCE[0]}")/../launch_common.sh"

MODEL=${MODEL-$ROOT/models/qwen3-tiny} # Hugging Face folder or hub id
TRAIN_JSON=${TRAIN_JSON-$ROOT/data/first_run.jsonl}
SEQ_LEN=${SEQ_LEN-} # tokens per row
# rows per optimizer step = processes / STAGES x MICRO_BATCH_SIZE x GRAD_ACCUM_STEPS; with few
# micro-batches the stages wait for one another; for the bundled model and data 16 on any number of
# processes, unless the environment or a flag sets one of these
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE-4}
GRAD_ACCUM_STEPS=${GRAD_ACCUM_STEPS-4}
MAX_STEPS=${MAX_STEPS-}   # optimizer steps
NUM_EPOCHS=${NUM_EPOCHS-} # or passes over the data; default: for about 100 steps
LR=${LR-}
DTYPE=${DTYPE-} # auto, fp32, bf16, fp16
USE_ACTIVATION_CHECKPOINTING=${USE_ACTIVATION_CHECKPOINTING-} # less memory, more compute
OUTPUT_DIR=${OUTPUT_DIR-} # the folder of the run
SAVE_EVERY=${SAVE_EVERY-} # steps between checkpoints, besides the one at the end
RESUME=${RESUME-}         # auto: resume in OUTPUT_DIR if there is a checkpoint
STAGES=${STAGES-}       # pipeline stages; default 2
PARTITION=${PARTITION-} # balanced, uniform, parameters, or the blocks of each piece: 18,10
SCHEDULE=${SCHEDULE-}   # 1f1b, gpipe, interleaved, v
launch fsdp_pp/train_fsdp_pp.py "$@"
