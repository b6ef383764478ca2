"""`python -m eagle_graphs.plugin`: compiles the kernels for every target and prints what they use, as a table."""

from eagle_graphs.plugin.compile import report
from eagle_graphs.plugin.launch import Attention

ATTENTIONS = {
    "9 heads on 3, 64 wide": Attention(query_heads=9, kv_heads=3, head_dim=64, scale=64**-0.5),
    "32 heads on 8, 128 wide": Attention(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5),
    "8 heads on 4, 256 wide, cap and window": Attention(
        query_heads=8, kv_heads=4, head_dim=256, scale=256**-0.5, softcap=50.0, sliding_window=4096
    ),
}


def main() -> None:
    """Prints the table."""
    print("| target | attention | kernel | threads | registers | spilled | shared memory |")
    print("|---|---|---|---|---|---|---|")
    for line in report(ATTENTIONS):
        kernel = line.kernel
        print(
            f"| sm_{line.capability} | {line.attention} | {line.call} | {kernel.threads} | {kernel.registers} "
            f"| {kernel.spilled} | {kernel.shared} |"
        )


if __name__ == "__main__":
    main()
