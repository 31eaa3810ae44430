// Where the bytes of a matrix are: by tiles of 16 rows, chunk of 256 columns behind chunk, or row by
// row as in the file (tiles.py). A tile begins where its first row would in the file.
#pragma once

namespace voltapile {

// From a row of a tile to the next, and from a chunk of it to the next, in bytes.
struct Lay {
  int row, chunk;
};

// chunk_bytes: of 256 columns of a row. row_bytes: of all of them.
__device__ __forceinline__ Lay lay_of(bool is_tiled, int chunk_bytes, int row_bytes) {
  return is_tiled ? Lay{chunk_bytes, 16 * chunk_bytes} : Lay{row_bytes, chunk_bytes};
}

}  // namespace voltapile
