// The C interface of picture encoders.
#include "api_calls.h"
#include "encoder/encoder.h"
#include "kernels/kernel_sets.h"

using namespace edgedec;

namespace {

constexpr int64_t MOST_PATCHES = 1 << 16;

bool takes(const ec_encoder *encoder, int32_t n_x, int32_t n_y) {
  const int32_t merge = encoder->config.merge;
  return n_x >= 1 && n_y >= 1 && n_x <= MOST_PATCHES && n_y <= MOST_PATCHES && (int64_t)n_x * n_y <= MOST_PATCHES &&
         n_x % merge == 0 && n_y % merge == 0;
}

}  // namespace

int32_t ec_encoder_create(const ec_encoder_config *config, int32_t n_threads, const char *instruction_set,
                          ec_encoder **encoder) {
  return guarded([&] {
    require(n_threads >= 1 && n_threads <= 256, "the number of threads is out of range");
    const ec_kernels *kernels = ec_find_kernels(instruction_set);
    require(kernels != nullptr, "there is no such instruction set here");
    *encoder = new ec_encoder(*config, n_threads, *reinterpret_cast<const Kernels *>(kernels));
  });
}

int32_t ec_encoder_set_matrix(ec_encoder *encoder, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                              int64_t n_cols, int32_t transposed, const void *data, uint64_t n_bytes) {
  return guarded([&] {
    RowMatrix &matrix = encoder->matrix(which, layer);
    const uint64_t expected = row_matrix_bytes(type, n_rows, n_cols, transposed != 0);
    require(expected != 0, "an encoder reads no matrix of this type or shape");
    require(data != nullptr && n_bytes == expected, "a matrix of the encoder has another size");
    matrix = {type, n_rows, n_cols, transposed != 0, (const uint8_t *)data};
  });
}

int32_t ec_encoder_set_vector(ec_encoder *encoder, int32_t which, int32_t layer, const float *values, int64_t n) {
  return guarded([&] {
    require(n >= 0 && n <= 1 << 24, "a vector is too long");
    encoder->vector(which, layer).assign(values, values + n);
  });
}

void ec_encoder_set_mapping(ec_encoder *encoder, const ec_mapping *mapping) { encoder->mapping = mapping; }

int32_t ec_encoder_finish(ec_encoder *encoder) {
  return guarded([&] {
    require(!encoder->finished, "the encoder is finished already");
    encoder->finish();
  });
}

uint64_t ec_encoder_buffer_bytes(const ec_encoder *encoder, int32_t n_x, int32_t n_y) {
  return takes(encoder, n_x, n_y) ? Encoding::Sizes(*encoder, (int64_t)n_x * n_y).bytes(*encoder) : 0;
}

int32_t ec_encoder_encode(ec_encoder *encoder, const float *patches, const float *positions, int32_t n_x, int32_t n_y,
                          float *rows, uint64_t n_numbers, const volatile int32_t *cancel, float *mass, float *flow) {
  return guarded([&]() -> int32_t {
    require(encoder->finished && takes(encoder, n_x, n_y), "the encoder is not finished, or takes no such picture");
    const ec_encoder_config &c = encoder->config;
    require(n_numbers == (uint64_t)n_x * (uint64_t)n_y / (uint64_t)(c.merge * c.merge) * (uint64_t)c.n_out,
            "the rows have another size");
    const FaultsUnblocked unblocked;
    if (encoder->mapping != nullptr) encoder->mapping->check();
    const bool done = Encoding(*encoder, n_x, n_y, cancel).encode(patches, positions, rows, mass, flow);
    if (encoder->mapping != nullptr) encoder->mapping->check();
    if (done) return EC_OK;
    last_error() = "encoding the picture was cancelled";
    return EC_CANCELLED;
  });
}

void ec_encoder_destroy(ec_encoder *encoder) { delete encoder; }
