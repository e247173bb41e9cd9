# shellcheck shell=bash disable=SC2034
# Sourced by fsdp/launch_fsdp.sh and pp/launch_pp.sh: turns the settings at their top into flags of
# the training script, and starts it.

stopped() {
    echo "error: stopped by SIGINT" >&2
    exit 130
}
trap stopped INT

# launch torchrun|deepspeed SCRIPT "SETTING ..." [flags of the command line]
launch() {
    local launcher=$1 script=$2 settings=$3 name flag flags=()
    shift 3
    if [[ -n ${PYTHON:-} ]]; then
        # Without Ctrl-C, which would be a traceback here: the trap answers it afterwards.
        (trap '' INT && exec "$PYTHON" -c \
            'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))') || {
            echo "error: PYTHON=$PYTHON has no torch: unset PYTHON, and .venv is prepared and used" >&2
            exit 2
        }
    else
        trap 'exit 130' INT # setup.sh says why
        bash "$ROOT/setup.sh"
        trap stopped INT
        PYTHON=$ROOT/.venv/bin/python
    fi
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    for flag in "$@"; do
        case $flag in
        -h | --help) exec "$PYTHON" "$script" --help ;;
        --num_epochs*) NUM_EPOCHS=flag ;;
        esac
    done
    # Who asks for epochs doesn't mean the default number of steps; nor, by a flag, the environment's.
    if [[ $NUM_EPOCHS == flag ]] || { [[ -n $NUM_EPOCHS ]] && ! printenv MAX_STEPS >/dev/null; }; then
        MAX_STEPS=
    fi
    [[ $NUM_EPOCHS != flag ]] || NUM_EPOCHS=

    for name in MODEL TRAIN_JSON EVAL_JSON INPUT_KEY TARGET_KEY SEQ_LEN MICRO_BATCH_SIZE \
        GRAD_ACCUM_STEPS MAX_STEPS NUM_EPOCHS LR WEIGHT_DECAY WARMUP_STEPS LR_SCHEDULER \
        MAX_GRAD_NORM DTYPE PACK_SEQUENCES TRAIN_ON_PROMPT USE_ACTIVATION_CHECKPOINTING ATTN_IMPL \
        COMPILE SEED LOG_EVERY EVAL_EVERY EVAL_BATCH_SIZE OUTPUT_DIR REPORT_TO \
        TOKENIZER_NAME_OR_PATH DATA_FORMAT OVERLONG SAMPLE_TOKENS OVERWRITE DRY_RUN SAVE_EVERY KEEP_LAST RESUME $settings; do
        [[ -n ${!name} ]] || continue
        flag=--$(tr '[:upper:]' '[:lower:]' <<<"$name")
        flags+=("${flag/#--model/--model_name_or_path}" "${!name}")
    done
    set -- "$PYTHON" -m llm_demo.launch "$launcher" "$script" "${flags[@]}" "$@"
    echo "+ $(printf '%q ' "$@")"
    # Ctrl-C would be a traceback while Python starts. Where env can, it waits until we listen.
    if env --block-signal=INT true 2>/dev/null; then set -- env --block-signal=INT "$@"; fi
    exec "$@"
}
