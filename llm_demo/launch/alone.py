"""The command llm-demo-fsdp: fsdp/launch_script.py of the clone that is installed."""


def main() -> None:
    from fsdp.launch_script import main  # not in a copy of llm_demo, which says so

    main()
