// Large pieces of memory that are used again. The C library gives such a piece back to the kernel as soon as it is freed, and the kernel
// clears each page of the next one: for a batch of 256 stacks of four 84 x 84 frames that takes twice as long as copying them.
#pragma once

#include <cstddef>

namespace engram {

/// As std::malloc; what was in the memory before may still be there.
void* spare_or_new(std::size_t bytes) noexcept;

/// As std::free of what spare_or_new or std::malloc returned. Of large pieces the last ones that were freed are kept, up to 64 MiB in a
/// process. No thread waits for another one: where it would have to, it asks the C library.
void keep_or_free(void* memory) noexcept;

}  // namespace engram
