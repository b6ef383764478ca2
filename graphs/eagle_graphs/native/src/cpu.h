// Which instruction set the kernels run with.
#pragma once

namespace eagle {

// In rising order. kAvx2 has FMA; kAvx512 has F, BW, DQ, VL and VNNI.
enum class Isa { kPortable, kAvx2, kAvx512 };

// The best of this CPU, or what the environment variable EAGLE_CPU_ISA (portable, avx2, avx512) asks for.
// Throws Error where that is no such name, or is more than the CPU has.
Isa isa_from_environment();

}  // namespace eagle
