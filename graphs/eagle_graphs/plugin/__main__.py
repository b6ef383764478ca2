"""`python -m eagle_graphs.plugin`: compiles the kernels for every target and prints what they use, as a table."""

from eagle_graphs.plugin.compile import TARGETS, report
from eagle_graphs.plugin.launch import Attention

ATTENTIONS = {
    "9 heads on 3, 64 wide": Attention(query_heads=9, kv_heads=3, head_dim=64, scale=64**-0.5),
    "32 heads on 8, 128 wide": Attention(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5),
    "32 heads on 16, 128 wide, cap and window": Attention(
        query_heads=32, kv_heads=16, head_dim=128, scale=128**-0.5, softcap=50.0, sliding_window=4096
    ),
    "8 heads on 4, 256 wide": Attention(query_heads=8, kv_heads=4, head_dim=256, scale=256**-0.5),
}


def main() -> None:
    """Prints the table."""
    cells: dict[tuple[str, str], list[str]] = {}
    for line in report(ATTENTIONS):
        used = f"{line.kernel.registers} / {line.kernel.spilled} / {line.kernel.shared}"
        cells.setdefault((line.attention, line.call), []).append(used)
    print("Registers / bytes spilled / bytes of shared memory.\n")
    print("|".join(["", " attention ", " kernel ", *(f" sm_{capability} " for capability in TARGETS), ""]))
    print("|---" * (2 + len(TARGETS)) + "|")
    for (attention, call), used_by_target in cells.items():
        print(f"| {attention} | {call} | " + " | ".join(used_by_target) + " |")


if __name__ == "__main__":
    main()
