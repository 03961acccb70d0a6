"""Kernels of other packages, by stand-ins with the signatures that the packages publish and the formulas of papers."""

import inspect
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from torch import Tensor, nn
from torch.nn.attention import restore_flash_attention_impl

from tests.devices import DEVICE
from tests.torchtune.modules.test_models_on_cuda import KINDS, make_batch, make_model
from torchtune.data import Documents
from torchtune.modules import FlashAttentionKernel, OptionalKernels
from torchtune.modules.conversion import ConversionError
from torchtune.modules.kernels import (
    CAUSAL_CONV,
    DELTA_RULE,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    GROUPED_PRODUCTS,
    KERNELS,
    STATE_SPACE,
    SWIGLU,
    OptionalKernel,
    allow_kernels,
    card_of,
    describe_kernels,
    grouped,
)
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.kernels.grouped import RowGroups, grouped_mm
from torchtune.modules.mixers import GatedDeltaNet, Mamba2, ShortConv
from torchtune.modules.mixers._gated_delta_net import KERNEL_CHUNK

CUDA, CPU = torch.device("cuda"), torch.device("cpu")

# Attention within documents, for the stand-ins of flash attention.
ATTEND = '''
def attend(q, k, v, starts_q, starts_k, scale, causal, left, right):
    """Attention within documents: the output [t, n, h], and the logarithms of the softmax's denominators [n, t]."""
    outputs, denominators = [], []
    groups = q.shape[1] // k.shape[1]
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    for document in range(len(starts_q) - 1):
        queries = q[starts_q[document]:starts_q[document + 1]].float()
        span = slice(starts_k[document], starts_k[document + 1])
        keys, values = (t[span].float().repeat_interleave(groups, 1) for t in (k, v))
        position = torch.arange(len(queries), device=q.device)[:, None] + len(keys) - len(queries)
        distance = position - torch.arange(len(keys), device=q.device)
        hidden = (distance < 0) if causal or right == 0 else torch.zeros_like(distance, dtype=torch.bool)
        if left is not None and left >= 0:
            hidden = hidden | (distance > left)
        scores = torch.einsum("qnh,knh->nqk", queries, keys) * scale
        scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(torch.einsum("nqk,knh->qnh", scores.softmax(-1), values))
        denominators.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(q.dtype), torch.cat(denominators, 1)

def gradients_of(dout, q, k, v, *options):
    _, pull_back = torch.func.vjp(lambda *inputs: attend(*inputs, *options)[0], q, k, v)
    return pull_back(dout)
'''

# Module of a stand-in -> its source. Signatures are those of the rows' versions.
STAND_INS = {
    # fla-core 0.6.0
    "fla.ops.gated_delta_rule": """
import torch
from torch.nn.functional import normalize

calls = 0

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
                           cp_context=None, **kwargs):
    global calls
    calls += 1
    assert q.shape[0] == 1 and use_qk_l2norm_in_kernel, "documents come as one row"
    ends = cu_seqlens.tolist()
    chunks = [[document, number] for document in range(len(ends) - 1)
              for number in range(-((ends[document] - ends[document + 1]) // kwargs["chunk_size"]))]
    assert chunk_indices.dtype == torch.int32 and chunk_indices.tolist() == chunks, "the host has indexed the chunks"
    groups = v.shape[2] // k.shape[2]
    q, k = (normalize(t[0].float(), dim=-1, eps=1e-6).repeat_interleave(groups, 1) for t in (q, k))
    values, g, beta = v[0].float(), g[0].float(), beta[0].float()
    starts, outputs = set(cu_seqlens.tolist()), []
    for t in range(len(q)):
        if t in starts:
            state = torch.zeros(*values.shape[1:2], q.shape[-1], values.shape[-1], device=q.device)
        state = state * g[t].exp()[:, None, None]
        error = values[t] - torch.einsum("nhv,nh->nv", state, k[t])
        state = state + torch.einsum("nh,nv->nhv", k[t], error * beta[t][:, None])
        outputs.append(torch.einsum("nhv,nh->nv", state, q[t] * (scale or q.shape[-1] ** -0.5)))
    return torch.stack(outputs)[None].to(v.dtype), None
""",
    # causal-conv1d 1.7.0
    "causal_conv1d": """
import torch
from torch.nn.functional import silu

calls = 0

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    global calls
    calls += 1
    assert x.stride(1) == 1 and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
    b, c, s = x.shape
    columns = []
    for t in range(s):
        column = torch.zeros_like(x[:, :, 0])
        for tap in range(min(weight.shape[1], t + 1)):
            same = (seq_idx[:, t] == seq_idx[:, t - tap])[:, None]
            column = column + weight[:, -1 - tap] * x[:, :, t - tap] * same
        columns.append(column)
    out = torch.stack(columns, -1)
    if bias is not None:
        out = out + bias[:, None]
    return silu(out) if activation == "silu" else out
""",
    # mamba-ssm 2.3.2
    "mamba_ssm.ops.triton.ssd_combined": """
import torch
from torch.nn.functional import softplus

calls = 0

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
                              seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False):
    global calls
    calls += 1
    heads = x.shape[2] // B.shape[2]
    dt = dt.float() + dt_bias.float()
    if dt_softplus:
        dt = softplus(dt)
    dt = dt.clamp(*dt_limit)
    B, C = (t.float().repeat_interleave(heads, 2) for t in (B, C))
    state, outputs = torch.zeros(x.shape[0], x.shape[2], B.shape[-1], x.shape[3], device=x.device), []
    for t in range(x.shape[1]):
        if t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = (dt[:, t] * A).exp()[..., None, None]
        written = torch.einsum("bhn,bhp->bhnp", B[:, t] * dt[:, t, :, None], x[:, t].float())
        state = state * decay + written
        outputs.append(torch.einsum("bhnp,bhn->bhp", state, C[:, t]) + x[:, t] * D[:, None])
    return torch.stack(outputs, 1).to(x.dtype)
""",
    # liger-kernel 0.8.5
    "liger_kernel.ops.swiglu": """
import torch
from torch.nn.functional import silu

calls = 0

class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        global calls
        calls += 1
        ctx.save_for_backward(a, b)
        return silu(a) * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        gate = a.sigmoid()
        return grad * b * gate * (1 + a * (1 - gate)), grad * silu(a), None, None
""",
    # grouped-gemm 0.3.0
    "grouped_gemm.ops": """
import torch

calls = 0

def gmm(a, b, batch_sizes, trans_a=False, trans_b=False):
    global calls
    calls += 1
    parts = a.split(batch_sizes.tolist())
    if trans_a:
        return torch.stack([part.t() @ rows for part, rows in zip(parts, b.split(batch_sizes.tolist()), strict=True)])
    return torch.cat([part @ matrix for part, matrix in zip(parts, b, strict=True)])
""",
    # flash-attn-3 3.0.0: its operators, as its C++ file declares them
    "flash_attn_interface": """
import torch

calls = 0
library = torch.library.Library("flash_attn_3", "FRAGMENT")
library.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> Tensor"
)

def fwd(q, k, v, *given):
    global calls
    calls += 1
    scale, causal, left, right = given[20:24]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, denominators = attend(q, k, v, given[4], given[5], scale, causal, left, right)
    return out, denominators, q.new_empty(0), q.new_empty(0)

def bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, *given):
    scale, causal, left, right = given[6:10]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grads = gradients_of(dout, q, k, v, given[0], given[1], scale, causal, left, right)
    for target, grad in zip((dq, dk, dv), grads):
        target.copy_(grad)
    return q.new_empty(0)

library.impl("fwd", fwd, "CUDA")
library.impl("bwd", bwd, "CUDA")
"""
    + ATTEND,
    # flash-attn-4 4.0.0b36
    "flash_attn.cute.interface": """
import torch

calls = 0

def _flash_attn_fwd(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
                    max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
                    window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None,
                    return_lse=False, out=None, lse=None):
    global calls
    calls += 1
    assert return_lse
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, window_size_left, window_size_right)

def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                    max_seqlen_q=None, max_seqlen_k=None, deterministic=False):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return gradients_of(
        dout, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, window_size_left, window_size_right
    )
"""
    + ATTEND,
}


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Install the stand-ins for a test, as packages with versions."""
    for kernel in KERNELS:
        path = tmp_path / Path(*kernel.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_INS[kernel.module])
        information = tmp_path / f"{kernel.package.replace('-', '_')}-{kernel.version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {kernel.package}\nVersion: {kernel.version}\n")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    allow_kernels(None)
    yield
    allow_kernels(None)
    tops = {module.partition(".")[0] for module in STAND_INS}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in tops:
            del sys.modules[name]


@pytest.fixture
def an_a100(monkeypatch):
    """What the driver of an A100 answers, on a machine without a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    allow_kernels(None)
    yield
    allow_kernels(None)


def distance(computed: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of the expected values."""
    return ((computed.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3)).item()


def calls(kernel: OptionalKernel) -> int:
    return sys.modules[kernel.module].calls


MIXERS = {
    "gated delta rule": lambda: GatedDeltaNet(
        embed_dim=24, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_taps=4, norm_eps=1e-6
    ),
    "mamba 2": lambda: Mamba2(
        embed_dim=24, num_heads=4, head_dim=6, num_groups=2, state_dim=8, conv_taps=4, norm_eps=1e-6, dt_max=0.3
    ),
    "mamba 2 with factors": lambda: Mamba2(
        embed_dim=24,
        num_heads=4,
        head_dim=8,
        num_groups=2,
        state_dim=8,
        conv_taps=3,
        norm_eps=1e-6,
        scales=(0.5, 2.0, 0.7, 1.5, 0.9),
        has_norm=False,
    ),
    "short convolution": lambda: ShortConv(embed_dim=24, conv_taps=3),
}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_mixer_computes_the_same_with_kernels_of_other_packages(kind, rows):
    torch.manual_seed(0)
    mixer = MIXERS[kind]()
    documents = Documents.from_lengths([140, 1, 30, 9, 160, 20][: 4 if rows == 1 else 6], DEVICE)
    x = torch.randn(rows, documents.num_tokens // rows, 24)
    boundaries = Boundaries.of(documents, kernel_chunk=KERNEL_CHUNK)
    batch = {"input_pos": documents.positions().view(rows, -1), "documents": boundaries}
    used = []
    results = []
    for has_kernels in (False, True):
        if has_kernels:
            for module in mixer.modules():
                for row, kind_of_module in ((DELTA_RULE, GatedDeltaNet), (STATE_SPACE, Mamba2)):
                    if isinstance(module, kind_of_module):
                        module.kernel = row.load()
                        used.append(row)
            mixer.conv.kernel = CAUSAL_CONV.load()
            used.append(CAUSAL_CONV)
        leaf = x.clone().requires_grad_()
        out = mixer(leaf, **batch)
        grads = torch.autograd.grad(out.square().sum(), [leaf, *mixer.parameters()])
        results.append([out, *grads])
    assert [calls(row) for row in used] == [1] * len(used)
    for computed, expected in zip(*results, strict=True):
        assert distance(computed, expected) < 1e-4


@pytest.mark.usefixtures("stand_ins")
def test_generation_with_a_cache_does_not_use_kernels_for_training():
    torch.manual_seed(0)
    mixer = MIXERS["gated delta rule"]().eval()
    mixer.kernel = DELTA_RULE.load()
    mixer.conv.kernel = CAUSAL_CONV.load()
    mixer.setup_cache(1, torch.float32, 16)
    with torch.no_grad():
        mixer(torch.randn(1, 5, 24))
    assert calls(DELTA_RULE) == calls(CAUSAL_CONV) == 0


@pytest.mark.usefixtures("stand_ins")
def test_kernels_of_other_packages_compute_swiglu_and_products_of_experts():
    torch.manual_seed(0)
    gate, up = (torch.randn(7, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(SWIGLU.load().apply(gate, up), nn.functional.silu(gate) * up)
    assert torch.autograd.gradcheck(SWIGLU.load().apply, (gate, up))
    x = torch.randn(9, 16)
    weight = torch.randn(3, 16, 8)
    counts = torch.tensor([4, 0, 5])
    groups = RowGroups.of(counts)
    product = grouped._other_grouped_mm(GROUPED_PRODUCTS.load(), x, weight, counts)
    torch.testing.assert_close(product, grouped_mm(x, weight, groups))
    of_weight = GROUPED_PRODUCTS.load()(x, product, counts, trans_a=True)
    torch.testing.assert_close(of_weight, grouped.grouped_outer(x, product, groups))


@pytest.mark.usefixtures("stand_ins")
def test_a_cpu_uses_no_kernel_of_another_package():
    assert {kernel.obstacle(CPU) for kernel in KERNELS} == {"it runs on CUDA"}
    assert DELTA_RULE.choose("Gated DeltaNet", CPU, torch.bfloat16) is None
    for line, kernel in zip(describe_kernels(CPU), KERNELS, strict=True):
        assert line == f"{kernel.package} ({kernel.computes}): not used: it runs on CUDA"


@pytest.mark.usefixtures("stand_ins", "an_a100")
def test_a_kernel_is_used_where_card_dtype_and_sizes_fit():
    assert DELTA_RULE.obstacle(CUDA, torch.bfloat16, head_dim=256) is None
    assert DELTA_RULE.obstacle(CUDA, torch.float32) == "it takes bfloat16 and float16, not float32"
    assert DELTA_RULE.obstacle(CUDA, head_dim=320) == "its largest head_dim is 256, and this model has 320"
    function = DELTA_RULE.choose("Gated DeltaNet", CUDA, torch.bfloat16, head_dim=128)
    assert function is sys.modules[DELTA_RULE.module].chunk_gated_delta_rule
    assert DELTA_RULE.choose("Gated DeltaNet", CUDA, torch.float32, head_dim=128) is None


@pytest.mark.usefixtures("an_a100")
def test_cost_of_a_missing_package_is_logged_once(caplog, monkeypatch):
    caplog.set_level("INFO", logger="torchtune")
    for _ in range(2):
        assert STATE_SPACE.choose("Mamba 2 of a test", CUDA, torch.bfloat16) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "Mamba 2 of a test on cuda in torch.bfloat16: plain PyTorch, because mamba-ssm is not installed (pip install "
        "--no-build-isolation 'torchtune[mamba]'); chunks of 64 positions are computed in dozens "
        "of launches."
    )


@pytest.mark.usefixtures("stand_ins", "an_a100")
@pytest.mark.parametrize(
    ("capability", "kernel", "reason"),
    [
        ((7, 5), DELTA_RULE, "it needs compute capability 8.0, and this card has 7.5"),
        ((12, 0), DELTA_RULE, None),
        ((12, 0), FLASH_ATTENTION_3, "it is written for compute capability 9.x, and this card has 12.0"),
        ((7, 5), CAUSAL_CONV, None),
    ],
)
def test_the_capability_of_the_card_decides_over_a_kernel(capability, kernel, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    problem = kernel.obstacle(CUDA, torch.float16)
    assert problem is None if reason is None else problem.startswith(reason)


@pytest.mark.usefixtures("an_a100")
def test_an_older_version_is_not_called(tmp_path, monkeypatch):
    (tmp_path / "fla_core-0.3.2.dist-info").mkdir()
    (tmp_path / "fla_core-0.3.2.dist-info" / "METADATA").write_text("Name: fla-core\nVersion: 0.3.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert DELTA_RULE.obstacle(CUDA) == "fla-core 0.3.2 is older than 0.6.0 (pip install 'torchtune[fla]')"


@pytest.mark.usefixtures("stand_ins", "an_a100")
def test_a_package_that_cannot_be_imported_is_not_used(tmp_path, caplog):
    caplog.set_level("INFO", logger="torchtune")
    (tmp_path / "causal_conv1d.py").write_text("raise ImportError('undefined symbol: c10\\nand a page')\n")
    assert CAUSAL_CONV.choose("Convolutions of a test", CUDA, torch.bfloat16, taps=4) is None
    assert "the import of causal_conv1d fails: ImportError: undefined symbol: c10;" in caplog.text


@pytest.mark.usefixtures("stand_ins", "an_a100")
def test_a_conversion_says_which_packages_layers_use():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    OptionalKernels(use=["fla-core"]).convert(model)
    assert DELTA_RULE.obstacle(CUDA) is None
    assert SWIGLU.obstacle(CUDA) == "OptionalKernels does not name liger-kernel"
    OptionalKernels(use=[]).convert(model)
    assert DELTA_RULE.choose("Gated DeltaNet", CUDA, torch.bfloat16) is None


@pytest.mark.usefixtures("an_a100")
def test_a_package_that_is_asked_for_must_be_there():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ConversionError, match=r"fla-core cannot run: fla-core is not .*pip install 'torchtune\[fla\]'"):
        OptionalKernels(use=["fla-core"]).convert(model)
    with pytest.raises(ConversionError, match="use has 'flash-attn', it may have fla-core, causal-conv1d"):
        OptionalKernels(use=["flash-attn"])


def test_every_package_has_an_extra_with_its_lowest_version():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for kernel in KERNELS:
        if "torchtune[" in kernel.install:
            extra = kernel.install.partition("torchtune[")[2].partition("]")[0]
            assert [line.replace("[cuda]", "") for line in extras[extra]] == [f"{kernel.package}>={kernel.version}"]
    assert [kernel for kernel in KERNELS if "torchtune[" not in kernel.install] == [FLASH_ATTENTION_3]
    assert FLASH_ATTENTION_4.is_asked_for


@pytest.mark.usefixtures("stand_ins")
def test_stand_ins_take_what_the_library_passes():
    """A stand-in has no argument of its own: what it does not name, the published function refuses as well."""
    for kernel in KERNELS:
        if kernel.function and kernel is not DELTA_RULE:
            function = kernel.load()
            parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
            assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("gated delta rule", [SWIGLU, DELTA_RULE, CAUSAL_CONV]),
        ("state space", [SWIGLU, STATE_SPACE, CAUSAL_CONV]),
        ("experts", [SWIGLU]),
    ],
)
def test_a_model_uses_what_is_installed_and_fits_the_card(kind, rows):
    results: list[list[Tensor]] = []
    for packages in ([], None):
        allow_kernels(packages)
        model = make_model(**KINDS[kind]).to("cuda", torch.bfloat16)
        batch = make_batch().to("cuda")
        out = model(**batch.model_inputs())
        out.square().mean().backward()
        results.append([out, *(parameter.grad for parameter in model.parameters())])
    for row in rows:
        is_used = row.module in sys.modules and calls(row) > 0
        assert is_used == (row.obstacle(CUDA, torch.bfloat16) is None), row.package
    for computed, expected in zip(*results, strict=True):
        assert distance(computed, expected) < 8e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:(?s).*Overriding a previously registered kernel")
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("name", "row"), [("FA3", FLASH_ATTENTION_3), ("FA4", FLASH_ATTENTION_4)])
def test_flash_attention_of_another_package_computes_what_torch_does(name, row):
    """In a layer with a window, and in one without."""
    if torch.cuda.get_device_capability()[0] not in row.majors:
        pytest.skip(f"{row.package} is not for this card")
    results: list[list[Tensor]] = []
    for is_converted in (False, True):
        model = make_model(**KINDS["window"]).to("cuda", torch.bfloat16)
        if is_converted:
            assert FlashAttentionKernel(name).convert(model).replaced
        batch = make_batch().to("cuda")
        try:
            out = model(**batch.model_inputs())
            out.square().mean().backward()
        finally:
            restore_flash_attention_impl(_raise_warn=False)
        results.append([out, *(parameter.grad for parameter in model.parameters())])
    assert calls(row) == 2, "one for each layer"
    for computed, expected in zip(*results, strict=True):
        assert distance(computed, expected) < 8e-2


@pytest.mark.cuda_host
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_is_asked_once_for_a_grouped_product():
    allow_kernels(None)
    card = card_of(CUDA)
    assert card.has_grouped_products == (card.capability in ((9, 0), (10, 0)))
    assert card_of(CUDA) is card
    assert torch.cuda.get_sync_debug_mode() == 0
