// The C interface: it checks arguments and turns exceptions into error codes.
#include <math.h>
#include <string.h>

#include <memory>
#include <string>

#include "api_calls.h"
#include "draft_head/draft_head.h"
#include "kernels/kernel_sets.h"
#include "kernels/row.h"
#include "weights/tensor_types.h"
#include "weights/tiles.h"

using namespace edgedec;

std::string &edgedec::last_error() {
  static thread_local std::string text;
  return text;
}

namespace {

const Kernels *find_kernels(const char *name) {
  for (const Kernels *const *k = all_kernels(); *k != nullptr; ++k)
    if ((*k)->supported() && (name == nullptr || strcmp(name, (*k)->name) == 0)) return *k;
  throw Invalid(std::string("no instruction set '") + name + "' here; there is: " + ec_instruction_sets());
}

uint64_t row_bytes(int32_t type, int64_t n_cols) {
  const BlockLayout block = block_layout(type);
  return (uint64_t)(n_cols / block.columns) * (uint64_t)block.bytes;
}

}  // namespace

int32_t ec_abi_version(void) { return EC_ABI_VERSION; }

uint64_t ec_size(const char *structure) {
#define EC_SIZE(name) \
  if (strcmp(structure, #name) == 0) return sizeof(name);
  EC_STRUCTURES(EC_SIZE)
#undef EC_SIZE
  return 0;
}

const char *ec_last_error(void) { return last_error().c_str(); }

const char *ec_instruction_sets(void) {
  static const std::string names = [] {
    std::string all;
    for (const Kernels *const *k = all_kernels(); *k != nullptr; ++k)
      if ((*k)->supported()) all += (all.empty() ? "" : " ") + std::string((*k)->name);
    return all;
  }();
  return names.c_str();
}

int32_t ec_keep_to_cores(int32_t n_threads, const int32_t *cpus, const int32_t *n_cpus) {
  return guarded([&] {
    require(n_threads >= 1 && n_threads <= 256, "n_threads must be from 1 to 256");
    std::vector<std::vector<int32_t>> cores;
    for (int32_t i = 0; i < n_threads; ++i) {
      require(n_cpus[i] >= 0 && n_cpus[i] <= 1024, "a core has from 0 to 1,024 logical processors");
      cores.emplace_back(cpus, cpus + n_cpus[i]);
      cpus += n_cpus[i];
    }
    Pool::shared(n_threads).keep_to_cores(std::move(cores));
  });
}

int32_t ec_file_read(int64_t file, uint64_t file_bytes, uint64_t offset, uint64_t n_bytes, void *pages) {
  return guarded([&] {
    require(offset <= file_bytes && n_bytes <= file_bytes - offset, "what is to be read lies beyond the file's end");
    File(file, file_bytes).read_pages(offset, n_bytes, (uint8_t *)pages, nullptr);
  });
}

int32_t ec_mapping_open(const void *data, uint64_t n_bytes, int64_t file, ec_mapping **mapping) {
  return guarded([&] {
    require(data != nullptr && n_bytes > 0, "a mapping is empty");
    *mapping = new ec_mapping(data, n_bytes, file);
  });
}

int32_t ec_mapping_check(const ec_mapping *mapping) {
  return guarded([&] {
    mapping->check();
  });
}

void ec_mapping_close(ec_mapping *mapping) { delete mapping; }

uint64_t ec_tile_bytes(int32_t type, int64_t n_rows, int64_t n_cols) { return tile_bytes(type, n_rows, n_cols); }

int32_t ec_tile_pack(int32_t type, int64_t n_rows, int64_t n_cols, int64_t row_begin, int64_t row_end,
                     const void *source, uint64_t source_bytes, void *tiles, uint64_t n_tile_bytes) {
  return guarded([&] {
    check_tiles(type, n_rows, n_cols, n_tile_bytes);
    require(row_begin >= 0 && row_begin < row_end && row_end <= n_rows && row_begin % TILE_ROWS == 0 &&
                (row_end % TILE_ROWS == 0 || row_end == n_rows),
            "the rows to pack are out of range");
    require(source_bytes == row_bytes(type, n_cols) * (uint64_t)(row_end - row_begin), "the rows have another size");
    pack_tiles(type, n_cols, row_begin, row_end, (const uint8_t *)source, (uint8_t *)tiles);
  });
}

int32_t ec_rows_to_q4_0(int32_t type, int64_t n_rows, int64_t n_cols, const void *source, uint64_t source_bytes,
                        void *rows, uint64_t n_bytes) {
  return guarded([&] {
    require(n_rows > 0 && tile_bytes(type, n_rows, n_cols) != 0 && n_cols % block_layout(Q4_0).columns == 0,
            "there is no such matrix in Q4_0");
    require(source_bytes == row_bytes(type, n_cols) * (uint64_t)n_rows, "the rows have another size");
    require(n_bytes == row_bytes(Q4_0, n_cols) * (uint64_t)n_rows, "the rows of Q4_0 have another size");
    rows_to_q4_0(type, n_rows, n_cols, (const uint8_t *)source, (uint8_t *)rows);
  });
}

int32_t ec_model_create(const ec_config *config, int32_t n_threads, int32_t max_rows, const char *instruction_set,
                        ec_model **model) {
  return guarded([&] {
    require(n_threads >= 1 && n_threads <= 256, "the number of threads is out of range");
    require(max_rows >= 1 && max_rows <= 4096, "the number of rows is out of range");
    *model = new ec_model(*config, n_threads, max_rows, find_kernels(instruction_set));
  });
}

namespace {

Matrix &matrix_of(ec_model *model, int32_t which, int32_t layer) {
  require(!model->finished && which >= 0 && which < EC_N_MATRICES, "no such matrix");
  require(which < EC_Q || (layer >= 0 && layer < model->config.n_layer), "no such layer");
  switch (which) {
    case EC_TOKEN_EMBD: return model->token_embd;
    case EC_OUTPUT: return model->output;
    case EC_PER_LAYER_ROWS: return model->per_layer.table;
    case EC_PER_LAYER_PROJECTION: return model->per_layer.projection;
    default: return model->layers[(size_t)layer].matrices[which];
  }
}

}  // namespace

int32_t ec_model_set_matrix(ec_model *model, int32_t which, int32_t layer, int32_t type, int64_t n_rows, int64_t n_cols,
                            const void *tiles, uint64_t n_tile_bytes) {
  return guarded([&] {
    Matrix &matrix = matrix_of(model, which, layer);
    check_tiles(type, n_rows, n_cols, n_tile_bytes);
    require(tiles != nullptr, "a matrix has no tiles");
    matrix = {type, n_rows, n_cols, (const uint8_t *)tiles, model->ahead_of(type)};
  });
}

void ec_model_set_mapping(ec_model *model, const ec_mapping *mapping) { model->mapping = mapping; }

int32_t ec_model_read_rows(ec_model *model, int32_t which, int64_t file, uint64_t file_bytes, uint64_t offset) {
  return guarded([&] {
    require(which == EC_TOKEN_EMBD || which == EC_PER_LAYER_ROWS, "rows of this matrix are not read alone");
    const Matrix &matrix = matrix_of(model, which, 0);
    require(matrix.n_rows != 0, "the matrix comes first");
    if (which == EC_TOKEN_EMBD) model->row_file.open(File(file, file_bytes), offset, matrix, 1);
    else model->per_layer.file.open(File(file, file_bytes), offset, matrix, model->config.n_layer);
  });
}

int32_t ec_model_place_matrix(ec_model *model, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                              int64_t n_cols, uint64_t offset, uint64_t n_tile_bytes) {
  return guarded([&] {
    Matrix &matrix = matrix_of(model, which, layer);
    check_tiles(type, n_rows, n_cols, n_tile_bytes);
    model->streamer.place(which, which < EC_Q ? 0 : layer, offset, n_tile_bytes);
    matrix = {type, n_rows, n_cols, nullptr, model->ahead_of(type)};
  });
}

int32_t ec_model_stream(ec_model *model, int64_t file, uint64_t file_bytes, const ec_part *parts, int32_t n_parts,
                        uint64_t ring_bytes) {
  return guarded([&] {
    model->streamer.start(*model, file, file_bytes, parts, n_parts, ring_bytes);
  });
}

int32_t ec_model_stream_experts(ec_model *model, int32_t n_slots) {
  return guarded([&] {
    model->streamer.start_experts(n_slots);
  });
}

void ec_model_expert_reads(const ec_model *model, uint64_t *counts) {
  const ExpertStore::Counts found = model->experts.counts();
  counts[0] = found.wanted;
  counts[1] = found.present;
}

void ec_model_experts(const ec_model *model, uint64_t *n_layers, uint64_t *n_experts) {
  for (int32_t n = 0; n <= model->max_rows; ++n) {
    const bool known = (size_t)n < model->touched.size();
    n_layers[n] = known ? model->touched[(size_t)n].n_layers : 0;
    n_experts[n] = known ? model->touched[(size_t)n].n_experts : 0;
  }
}

uint64_t ec_model_streamed_bytes(ec_model *model) { return model->streamer.bytes_read(); }

int32_t ec_model_set_vector(ec_model *model, int32_t which, int32_t layer, const float *values, int64_t n) {
  return guarded([&] {
    require(!model->finished && which >= 0 && which < EC_N_VECTORS && n >= 0 && n <= 1 << 20, "no such vector");
    require(which < EC_ATTN_NORM || (layer >= 0 && layer < model->config.n_layer), "no such layer");
    std::vector<float> &vector = which == EC_OUTPUT_NORM      ? model->output_norm
                                 : which == EC_PER_LAYER_NORM ? model->per_layer.norm
                                                              : model->layers[(size_t)layer].vectors[which];
    vector.assign(values, values + n);
  });
}

int32_t ec_model_set_layers(ec_model *model, const ec_layer *layers) {
  return guarded([&] {
    require(!model->finished, "the model is finished already");
    model->set_layers(layers);
  });
}

int32_t ec_model_set_rope(ec_model *model, int32_t sliding, const double *frequencies, const uint8_t *axes, int64_t n,
                          double magnitude) {
  return guarded([&] {
    require(!model->finished && (sliding == 0 || sliding == 1) && n >= 0 && n <= 1 << 20, "no such rotation");
    require(isfinite(magnitude) && magnitude > 0, "the magnitude of rotated elements is not a positive number");
    for (int64_t i = 0; i < n; ++i) require(isfinite(frequencies[i]), "a frequency of rotations is not a number");
    model->rope[sliding] = {std::vector<double>(frequencies, frequencies + n), magnitude, {}};
    if (axes != nullptr) {
      require(std::all_of(axes, axes + n, [](uint8_t axis) { return axis < 3; }), "a pair turns to no place");
      model->rope[sliding].axes.assign(axes, axes + n);
    }
    // What turns by less than any float shows does not turn: products with its sine would be tiny, which is slow.
    for (double &frequency : model->rope[sliding].frequencies)
      if (fabs(frequency) < 1e-20) frequency = 0.0;
  });
}

namespace {

constexpr int32_t MOST_ADAPTERS = 64;
constexpr int64_t MOST_RANK = 1 << 12;

// Return the matrix of a model that an adapter may change.
const Matrix &changeable(ec_model *model, int32_t which, int32_t layer) {
  const bool is_once = which == EC_PER_LAYER_PROJECTION;
  const bool is_of_layer = which >= EC_Q && which < EC_N_MATRICES && which != EC_PER_LAYER_ROWS &&
                           (which < EC_GATE_EXPERTS || which > EC_DOWN_EXPERTS);
  require(is_of_layer, "adapters do not change this matrix");
  require(layer >= 0 && layer < model->config.n_layer, "no such layer");
  const Matrix &matrix = is_once ? model->per_layer.projection : model->layers[(size_t)layer].matrices[which];
  require(matrix.n_rows != 0, "the model has no such matrix");
  return matrix;
}

}  // namespace

int32_t ec_model_adapt(ec_model *model, int32_t adapter, int32_t which, int32_t layer, int32_t type, int64_t rank,
                       float factor, const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes) {
  return guarded([&] {
    require(!model->finished && !model->of_head, "adapters come before the model is finished");
    require(adapter >= 0 && adapter < MOST_ADAPTERS, "there are too many adapters");
    require(is_float_type(type) && rank >= 1 && rank <= MOST_RANK, "the rank or the type of an adapter is out of range");
    require(isfinite(factor), "the factor of an adapter is not finite");
    const Matrix &matrix = changeable(model, which, layer);
    require(a_bytes == tile_bytes(type, rank, matrix.n_cols) && b_bytes == tile_bytes(type, matrix.n_rows, rank),
            "the tiles of an adapter have another size");
    Adapters &adapters = model->adapters;
    std::vector<AdapterPair> &pairs = adapters.pairs[&matrix];
    require(pairs.empty() || pairs.back().adapter < adapter, "an adapter changes a matrix twice, or is out of order");
    pairs.push_back({adapter,
                     {type, rank, matrix.n_cols, (const uint8_t *)a},
                     {type, matrix.n_rows, rank, (const uint8_t *)b},
                     factor,
                     adapters.widths[layer]});
    adapters.widths[layer] += rank;
    adapters.n = std::max(adapters.n, adapter + 1);
  });
}

int32_t ec_session_adapt(ec_session *session, const float *scales, int32_t n) {
  return guarded([&] {
    require(n >= 0 && n <= session->model->adapters.n, "there are fewer adapters");
    for (int32_t i = 0; i < n; ++i) require(isfinite(scales[i]), "the scale of an adapter is not finite");
    session->adapter_scales.assign(scales, scales + n);
  });
}

int32_t ec_model_finish(ec_model *model) {
  return guarded([&] {
    require(!model->finished, "the model is finished already");
    model->finish();
  });
}

int32_t ec_model_finish_elsewhere(ec_model *model, ec_look_up look_up) {
  return guarded([&] {
    require(!model->finished, "the model is finished already");
    model->look_up = look_up;
    model->elsewhere = model->finished = true;
  });
}

const char *ec_model_instruction_set(const ec_model *model) { return model->kernels->name; }

void ec_model_destroy(ec_model *model) { delete model; }

int32_t ec_forward(ec_model *model, const ec_item *items, int32_t n_items, float *logits, int32_t *best,
                   const volatile int32_t *cancel) {
  return guarded([&]() -> int32_t {
    require(n_items >= 1, "a forward has no items");
    if (model->mapping != nullptr) model->mapping->check();
    const Outcome outcome = forward(*model, items, n_items, logits, best, cancel);
    if (model->mapping != nullptr) model->mapping->check();
    if (outcome == Outcome::done) return EC_OK;
    last_error() = outcome == Outcome::cancelled ? "the forward was cancelled" : "the model's logits are not finite";
    return outcome == Outcome::cancelled ? EC_CANCELLED : EC_NOT_FINITE;
  });
}

namespace {

// Return what `body` returns, or -1 where the system refuses memory or the row is empty.
template <class Body>
int64_t counted(int64_t n, Body body) {
  int64_t result = -1;
  guarded([&] {
    require(n >= 1 && n <= INT32_MAX, "a row of logits is empty");
    result = body();
  });
  return result;
}

const Kernels &of(const ec_kernels *kernels) { return *reinterpret_cast<const Kernels *>(kernels); }

}  // namespace

const ec_kernels *ec_find_kernels(const char *instruction_set) {
  const Kernels *found = nullptr;
  guarded([&] {
    found = find_kernels(instruction_set);
  });
  return reinterpret_cast<const ec_kernels *>(found);
}

double ec_row_total(const ec_kernels *kernels, const float *row, int64_t n, float *most) {
  double sum = -1;
  counted(n, [&] {
    sum = row_total(of(kernels), row, n, most);
    return 0;
  });
  return sum;
}

int64_t ec_row_above(const ec_kernels *kernels, const float *row, int64_t n, float threshold, int64_t *indices,
                     int64_t capacity) {
  return counted(n, [&] { return row_above(of(kernels), row, n, threshold, indices, capacity); });
}

int32_t ec_row_top_k(const ec_kernels *kernels, const float *row, int64_t n, int64_t top_k, int64_t *indices) {
  return guarded([&] {
    require(n >= 1 && n <= INT32_MAX && top_k >= 1 && top_k <= n, "a row of logits has not so many values");
    row_top_k(of(kernels), row, n, top_k, indices);
  });
}

int64_t ec_row_nucleus(const ec_kernels *kernels, const float *row, int64_t n, double top_p, int64_t *indices,
                       int64_t capacity) {
  return counted(n, [&] { return row_nucleus(of(kernels), row, n, top_p, indices, capacity); });
}

int64_t ec_row_contenders(const ec_kernels *kernels, const float *row, int64_t n, float temperature, uint64_t key,
                          int64_t *indices, int64_t capacity) {
  return counted(n, [&] { return row_contenders(of(kernels), row, n, temperature, key, indices, capacity); });
}
