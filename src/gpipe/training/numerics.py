"""Choose which kernels torch may use: deterministic ones, and ones that round the factors of products."""

import os

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_numerics(*, deterministic: bool, float32_matmul_precision: str, tries_kernels: bool = False) -> None:
    """Set torch's choice of kernels for this process; call it before the first product on a GPU.

    Args:
        deterministic: use kernels that give the same bits for the same numbers, also on another GPU of the same kind.
            torch raises an error if an operation has none.
        float32_matmul_precision: highest, high (TF32 products on a GPU) or medium, as in torch; convolutions on a GPU
            use TF32 too unless it is highest.
        tries_kernels: let cuDNN time the kernels of a convolution at the first input of each shape, and use the
            fastest; ignored with `deterministic`, because each process might choose another kernel.
    """
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = tries_kernels and not deterministic
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # otherwise cuBLAS sums in any order; torch checks this
    torch.set_float32_matmul_precision(float32_matmul_precision)
    torch.backends.cudnn.allow_tf32 = float32_matmul_precision != "highest"
