BALANCED, BASELINE, MOVIELENS, SYNTHETIC = "dlrm_balanced", "float32", "dlrm_movielens", "dlrm_synthetic"


def products_of(precision, matmul):
    return precision if matmul == "float32" else matmul


def render(record):
    return ""
