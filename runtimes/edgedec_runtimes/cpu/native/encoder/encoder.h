// A picture's encoder: its weights, and one picture (or one tile of a picture) on its way through them.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "edgedec_cpu.h"
#include "forward/model.h"
#include "kernels/kernels.h"
#include "threads/pool.h"
#include "weights/mapping.h"
#include "weights/tensor_types.h"

namespace edgedec {

// A matrix as a GGUF has it: rows one behind the other, or columns where it is transposed.
struct RowMatrix {
  int32_t type = 0;
  int64_t n_rows = 0, n_cols = 0;
  bool transposed = false;
  const uint8_t *data = nullptr;  // nullptr: there is none
};

// Return the bytes of a matrix's rows; 0 for a type or a shape that encoders do not read.
uint64_t row_matrix_bytes(int32_t type, int64_t n_rows, int64_t n_cols, bool transposed);

struct EncoderLayer {
  RowMatrix matrices[EC_ENCODER_N_MATRICES];
  std::vector<float> vectors[EC_ENCODER_N_VECTORS];
};

constexpr int64_t PIECE_COLUMNS = 256;  // columns of a panel that pass rows together: 16 KB stay in the L1 cache
constexpr int64_t PIECE_TILES = 8;      // the most panels whose products a thread makes together
constexpr int64_t PIECE_ROWS = 1024;    // the most rows
constexpr int64_t ROWS_TOGETHER = 48;   // rows that pass a panel's piece one behind the other: they stay in the L2 cache
constexpr int64_t QUERIES_TOGETHER = 96, KEYS_TOGETHER = 256;

inline int64_t pieces_of(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }

// Rows of numbers, whose products are wanted: floats, or whole numbers with a scale for each PIECE_COLUMNS columns.
struct EncoderRows {
  const float *x;
  int64_t n, n_cols;
  const float *scales;  // [n][pieces_of(n_cols)]; nullptr: the rows are floats
};

}  // namespace edgedec

struct ec_encoder {
  // Throws Invalid where the shape is impossible.
  ec_encoder(const ec_encoder_config &config, int n_threads, const edgedec::Kernels &kernels);

  int64_t head_dim() const { return config.n_embd / config.n_head; }
  // Return where a matrix, or a vector, is kept. Throws Invalid where there is none of that number.
  edgedec::RowMatrix &matrix(int32_t which, int32_t layer);
  std::vector<float> &vector(int32_t which, int32_t layer);
  // Check that all that is needed is there, with the right shapes. Throws Invalid.
  void finish();
  // Whether products with a matrix are made of whole numbers.
  bool takes_pairs(const edgedec::RowMatrix &w) const {
    return w.type == edgedec::Q8_0 && !w.transposed && kernels.pairs != nullptr;
  }

  const ec_encoder_config config;
  const edgedec::Kernels &kernels;
  edgedec::Pool &pool;
  const ec_mapping *mapping = nullptr;
  edgedec::EncoderLayer once;
  std::vector<edgedec::EncoderLayer> layers;
  bool finished = false;
};

namespace edgedec {

// One picture, or one tile of one, in an encoder.
class Encoding {
 public:
  // What is held meanwhile, in floats; scratch memory is that of one thread.
  struct Sizes {
    Sizes(const ec_encoder &encoder, int64_t n);
    int64_t states, keys, values, work, scales, scratch;
    uint64_t bytes(const ec_encoder &encoder) const;
  };

  Encoding(const ec_encoder &encoder, int32_t n_x, int32_t n_y, const volatile int32_t *cancel);

  // Write the rows, and mass and flow where they are not nullptr. Return false where *cancel stopped it. Throws
  // NotFinite, std::bad_alloc.
  bool encode(const float *patches, const float *positions, float *rows, float *mass, float *flow);

 private:
  // What becomes of products: sink(matrix, row, column, n products from that column on).
  using Sink = std::function<void(const RowMatrix &, int64_t, int64_t, const float *, int64_t)>;
  struct Piece {
    const RowMatrix *matrix;
    int64_t tile, last, row, end;
  };

  bool stopped() const { return cancel_ != nullptr && *cancel_ != 0; }
  // Call work(i, scratch memory) for i from 0 to n - 1 on all threads, unless *cancel stops it.
  void each(int64_t n, const std::function<void(int64_t, float *)> &work);
  // Return rows of floats as what a matrix is multiplied with, in the same memory.
  EncoderRows to_rows(float *x, int64_t n, int64_t n_cols, const RowMatrix &w);
  void norm(const std::vector<float> *norms, float *out);
  void product_piece(const EncoderRows &a, const Piece &piece, float *scratch) const;
  void products(const EncoderRows &a, const std::vector<const RowMatrix *> &matrices, const Sink &sink);
  void add_products(const EncoderRows &a, const RowMatrix &w, const std::vector<float> &bias, float *states);
  void attention_inputs(const EncoderLayer &layer);
  void attend(int64_t head, int64_t first, float *scratch, float *mass) const;
  void layer_flow(float *seen, float *flow);
  void feed_forward(const EncoderLayer &layer);
  void merge();
  void project(float *rows);

  const ec_encoder &e_;
  const ec_encoder_config &c_;
  const Kernels &kernels_;
  const int64_t n_x_, n_;
  const volatile int32_t *const cancel_;
  const Sizes sizes_;
  // x: the states; h: what matrices read; q, keys, values: of attention; later the same memory has other work.
  std::unique_ptr<uint8_t[]> memory_;
  float *x_, *h_, *q_, *keys_, *values_, *scales_, *scratch_;
};

// Unpack the columns [begin, end) of 16 rows of a matrix, from row `first` on; rows beyond the last are zero. Scratch
// memory has TILE_ROWS * PIECE_COLUMNS floats.
void unpack_panel(const Kernels &kernels, const RowMatrix &w, int64_t first, int64_t begin, int64_t end, float *scratch,
                  float *panel);
// The same as whole numbers, with a scale for each 32 columns of each row, [(end - begin) / 32][TILE_ROWS].
void unpack_pairs(const RowMatrix &w, int64_t first, int64_t begin, int64_t end, int16_t *scratch, int16_t *panel,
                  float *scales);

}  // namespace edgedec
