"""Compile kernels for an AMD GPU on a machine that has none: amd_worker.py ARCH ours|compiled

Prints a line of JSON for each kernel: what its machine code needs. A process is for one ARCH:
Triton's cache of a function's kernels does not tell them apart."""

import copy
import functools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from llm_demo.core import loss, loss_kernel, optim
from llm_demo.options import four_bits, four_bits_kernel

ROOT = Path(__file__).parent.parent
ARCH, PART = sys.argv[1:]
WARP = 64 if ARCH.startswith("gfx9") else 32  # threads: CDNA, RDNA


class Driver(DriverBase):
    """Of a GPU on which nothing is launched."""

    is_active = classmethod(lambda cls: True)
    get_current_target = lambda self: GPUTarget("hip", ARCH, WARP)  # noqa: E731
    get_current_device = lambda self: 0  # noqa: E731
    get_current_stream = lambda self, device: 0  # noqa: E731
    get_active_torch_device = lambda self: torch.device("cuda", 0)  # noqa: E731
    get_benchmarker = map_python_to_cpp_type = None  # for launches


def describe(name: str, kernel) -> None:
    code = kernel.asm["amdgcn"]

    def total(fact: str) -> int:
        return sum(map(int, re.findall(rf"\.{fact}:\s*(\d+)", code)))

    loads = re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", code)
    threads, spills = total("max_flat_workgroup_size"), total("[sv]gpr_spill_count")
    print(json.dumps({"name": name, "threads": threads, "spills": spills, "loads": loads}))


def ours() -> None:
    """Every kernel that we wrote, called as in a run."""
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        describe(f"{self.__name__} {args[0].dtype}", kernel)

    JITFunction.run = compile_only
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(warp_size=WARP)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.empty(4, 151_936, dtype=dtype)
        loss_kernel.loss_of_logits(logits, torch.zeros(4, dtype=torch.int64))
        rows = torch.zeros(64, four_bits.row_bytes(256), dtype=torch.uint8)
        scales = torch.zeros(four_bits.scales_of(64, 256) + four_bits.TABLES)
        four_bits_kernel.values(rows, scales, 256, dtype)


def compiled() -> None:
    """What torch.compile makes of a block of 0.6B, the loss, AdamW and sums. All of it runs on the
    CPU as it is traced; each graph is also compiled as if its tensors were on the GPU."""
    # not above: `ours` is quicker without them
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from transformers import AutoModelForCausalLM

    from llm_demo.core.attention import make_documents
    from llm_demo.core.decoder import Blocks, DecoderLoss, compile_forward
    from llm_demo.core.rows import position_ids
    from llm_demo.model.source import load_config

    pretend_there_is_a_gpu()

    def lower(graph, inputs):
        compile_fx_inner(*on_the_gpu(graph, inputs))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lower, decompositions=select_decomp_table())
    torch.compile = functools.partial(torch.compile, backend=backend)
    total, part = torch.zeros(1024, 1024), torch.ones(1024, 1024, dtype=torch.bfloat16)
    optim.compile_once(optim.add)([total], [part])
    for function in (optim.add_into, optim.sum_into):
        optim.compile_once(function)(total, [part, part])
    optim.compile_once(optim._adamw)(*total.repeat(4, 1, 1), *torch.ones(5), 0.9, 0.95, 1e-8)

    loss._kernel = lambda device_type: loss._loss_of_logits  # on a GPU it is `ours`
    config = load_config(ROOT / "models/qwen3-0.6b", 256)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    how = {"dtype": torch.bfloat16, "attn_implementation": "packed_math"}
    model = AutoModelForCausalLM.from_config(config, **how)
    unit = Blocks(list(model.model.layers), checkpointing=False)
    compile_forward(unit)
    model = DecoderLoss(model, [unit], compiled=True)
    cu, index = torch.tensor([0, 100, 256, 256], dtype=torch.int32), torch.arange(64)
    documents = make_documents(cu, (1, 256), "math", torch.device("cpu"))
    inputs = index.repeat(4)[None], position_ids(cu, (1, 256)), documents, index, index
    model(*inputs).backward()
    with torch.no_grad():
        model(*inputs, answers=index)


def on_the_gpu(graph, inputs):
    """A traced graph and its inputs, with every tensor on the GPU."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_map

    def moved(x):
        if isinstance(x, torch.Tensor):
            with detect_fake_mode(inputs):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")
        return torch.device("cuda", 0) if isinstance(x, torch.device) else x

    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
        node.meta["val"] = tree_map(moved, node.meta.get("val"))
    graph.recompile()
    return graph, tree_map(moved, inputs)


def pretend_there_is_a_gpu() -> None:
    """For the compiler, which then describes each kernel instead of loading it."""
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    properties = SimpleNamespace(
        name="AMD", gcnArchName=ARCH, major=9, minor=0, warp_size=WARP, multi_processor_count=64,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, total_memory=2**35,
        max_threads_per_block=1024, shared_memory_per_block=65536, L2_cache_size=2**23,
    )  # fmt: skip
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": (9, 0), "synchronize": None,
        "is_bf16_supported": True, "get_rng_state": torch.zeros(1), "set_rng_state": None,
        "set_device": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "_lazy_init": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.version.hip = "7.2"
    torch._C._cuda_getCurrentRawStream = lambda device: 0

    class Interface(device_interface.CudaInterface):
        current_device = staticmethod(lambda: 0)
        get_compute_capability = staticmethod(lambda device=None: ARCH)
        get_device_properties = staticmethod(lambda device=None: properties)
        is_available = is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    device_interface.init_device_reg()  # which would replace ours later
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, Interface)
    config.force_disable_caches, config.compile_threads = True, 1
    post_grad.reinplace_inplaceable_ops = lambda *args: None  # it copies one such tensor to another
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_heuristics.CachingAutotuner._make_launchers = lambda self: None
    make = triton.compile

    def compile_and_describe(source, target, options):
        kernel = make(source, target=target, options=options)
        describe(source.name, kernel)
        return kernel

    triton.compile = compile_and_describe


triton.runtime.driver.set_active(Driver())
{"ours": ours, "compiled": compiled}[PART]()
