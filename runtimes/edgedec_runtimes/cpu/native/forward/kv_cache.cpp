#include "forward/kv_cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "forward/require.h"
#include "weights/file.h"
#include "weights/tensor_types.h"

namespace edgedec {
namespace {

// A text that begins as another one has its next pages apart, as a huge page for a few tokens would be a waste.
constexpr size_t APART = 8;

// The index of number i of a token's n numbers: in a page of keys (in blocks of 16 tokens), and in a page of values.
int64_t key_place(int32_t in_page, int64_t n, int64_t i) {
  return (in_page / KEY_BLOCK * n + i) * KEY_BLOCK + in_page % KEY_BLOCK;
}
int64_t value_place(int32_t in_page, int64_t n, int64_t i) { return in_page * n + i; }

float rounded(float x, float inverse, float least, float most) {
  const float v = nearbyintf(x * inverse);
  return v < most ? (v > least ? v : least) : most;  // `most` for NaN
}

uint16_t scale_of(float scale, float *inverse) {
  const uint16_t half = float_to_half(scale);
  const float kept = half_to_float(half);
  *inverse = kept != 0.0f ? 1.0f / kept : 0.0f;
  return half;
}

// Round 32 floats to whole numbers from -127 to 127.
uint16_t to_int8(const float *x, int32_t *q) {
  float peak = 0.0f, inverse;
  for (int i = 0; i < 32; ++i) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
  const uint16_t scale = scale_of(peak / 127.0f, &inverse);
  for (int i = 0; i < 32; ++i) q[i] = (int32_t)rounded(x[i], inverse, -127.0f, 127.0f);
  return scale;
}

// Round 32 floats to whole numbers from -8 to 7, by the one of a few scales with the least squared error; the float of
// the largest magnitude becomes about -8.
uint16_t to_int4(const float *x, int32_t *q) {
  float peak = 0.0f, least = INFINITY;
  for (int i = 0; i < 32; ++i) peak = fabsf(x[i]) > fabsf(peak) ? x[i] : peak;
  uint16_t best = 0;
  for (const float steps : {-8.0f, -7.4f, -8.7f, 7.4f}) {
    float inverse, error = 0.0f;
    const uint16_t scale = scale_of(peak / steps, &inverse);
    for (int i = 0; i < 32; ++i) {
      const float d = x[i] - half_to_float(scale) * rounded(x[i], inverse, -8.0f, 7.0f);
      error += d * d;
    }
    if (error < least) least = error, best = scale;
  }
  const float kept = half_to_float(best), inverse = kept != 0.0f ? 1.0f / kept : 0.0f;
  for (int i = 0; i < 32; ++i) q[i] = (int32_t)rounded(x[i], inverse, -8.0f, 7.0f);
  return best;
}

// Find the places of the n largest magnitudes; of equal magnitudes the first places.
void largest(const float *x, int32_t d, int32_t n, uint8_t *places) {
  bool taken[OUTLIER_ELEMENTS] = {};
  for (int32_t j = 0; j < n; ++j) {
    int32_t best = -1;
    for (int32_t i = 0; i < d; ++i)
      if (!taken[i] && (best < 0 || fabsf(x[i]) > fabsf(x[best]))) best = i;
    taken[best] = true;
    places[j] = (uint8_t)best;
  }
}

int32_t key_bits(int32_t type) {
  return type == EC_KV_F16 ? 16 : type == EC_KV_INT8 || type == EC_KV_INT8_INT4 ? 8 : 4;
}

KVLayout layout_of(int32_t head_dim, int32_t type) {
  const int64_t tokens = PAGE_TOKENS;
  KVLayout layout{};
  layout.bits = key_bits(type);
  layout.value_bits = type == EC_KV_INT8_INT4 ? 4 : layout.bits;
  layout.n_groups = type == EC_KV_F16 ? 0 : head_dim / 32;
  layout.n_outliers = type == EC_KV_GEAR ? head_dim / OUTLIERS_OF : 0;
  layout.rotated = type == EC_KV_INT4;
  layout.values_rotated = type == EC_KV_INT4 || type == EC_KV_INT8_INT4;
  layout.values = tokens * head_dim * layout.bits / 8;
  layout.key_scales = layout.values + tokens * head_dim * layout.value_bits / 8;
  layout.value_scales = layout.key_scales + 2 * tokens * layout.n_groups;
  layout.key_outliers = layout.value_scales + 2 * tokens * layout.n_groups;
  layout.value_outliers = layout.key_outliers + 2 * tokens * layout.n_outliers;
  layout.key_places = layout.value_outliers + 2 * tokens * layout.n_outliers;
  layout.value_places = layout.key_places + tokens * layout.n_outliers;
  layout.bytes = layout.value_places + tokens * layout.n_outliers;
  return layout;
}

}  // namespace

KVShape::KVShape(const std::vector<Heads> &of_layers, int32_t type, int32_t n_rot)
    : bits(key_bits(type)), n_rot(n_rot) {
  for (const Heads &heads : of_layers) {
    layers.push_back({heads.n_head_kv, heads.head_dim, layout_of(heads.head_dim, type), rotations});
    rotations = layers.back().offset(heads.n_head_kv);
  }
}

KVCache::KVCache(const KVCache &other, int32_t n_tokens) : KVCache(other.shape_, other.n_ctx_) {
  for (size_t i = 0; i < (size_t)(n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS; ++i) {
    pages_[i] = other.pages_[i];
    addresses_[i] = pages_[i].get();
    first_in_memory_ = i + 1 + APART;
  }
}

void KVCache::trim(int32_t n_tokens) {
  for (size_t i = (size_t)(n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS; i < pages_.size(); ++i)
    pages_[i] = nullptr, addresses_[i] = nullptr;
}

std::shared_ptr<uint8_t> KVCache::new_page(size_t i) {
  const size_t n_bytes = (size_t)shape_.page_bytes();
  if (i >= first_in_memory_ && !memory_) {
    memory_ = huge_memory(n_bytes * pages_.size());
    if (!memory_) first_in_memory_ = pages_.size();  // calloc for all of them
  }
  if (i >= first_in_memory_ && in_memory_[i].expired()) {
    const auto freed = [memory = memory_, n_bytes](uint8_t *at) { give_back(at, n_bytes); };
    std::shared_ptr<uint8_t> page(memory_.get() + i * n_bytes, freed);
    in_memory_[i] = page;
    return page;
  }
  // calloc returns zero pages of the system, which take memory only where they are written
  uint8_t *page = (uint8_t *)calloc(n_bytes, 1);
  if (page == nullptr) throw std::bad_alloc();
  return std::shared_ptr<uint8_t>(page, free);
}

void KVCache::prepare(int32_t begin, int32_t end) {
  if (shape_.page_bytes() == 0) return;
  for (int32_t i = begin / PAGE_TOKENS; i <= (end - 1) / PAGE_TOKENS; ++i) {
    if (pages_[i] && pages_[i].use_count() == 1) continue;
    std::shared_ptr<uint8_t> page = new_page((size_t)i);
    if (pages_[i]) memcpy(page.get(), pages_[i].get(), (size_t)shape_.page_bytes());
    pages_[i] = page;
    addresses_[i] = page.get();
  }
}

namespace {

// The pieces of a head's keys or values in a page, and the places of a token's numbers in them.
struct Side {
  int32_t bits;
  uint8_t *data, *scales, *outliers, *places;
  int64_t (*place)(int32_t in_page, int64_t n, int64_t i);
};

void write_packed(const KVLayout &layout, const Side &to, int32_t in_page, int32_t d, float *x) {
  uint8_t places[OUTLIER_ELEMENTS / OUTLIERS_OF];
  for (int32_t begin = 0; layout.n_outliers > 0 && begin < d; begin += OUTLIER_ELEMENTS) {
    const int32_t width = std::min(d - begin, OUTLIER_ELEMENTS), n = width / OUTLIERS_OF;
    largest(x + begin, width, n, places);
    for (int32_t j = 0; j < n; ++j) {
      const int64_t at = to.place(in_page, layout.n_outliers, begin / OUTLIERS_OF + j);
      float *value = x + begin + places[j];
      ((uint16_t *)to.outliers)[at] = float_to_half(*value);
      to.places[at] = places[j];
      *value = 0.0f;
    }
  }
  for (int32_t g = 0; g < layout.n_groups; ++g) {
    int32_t q[32];
    uint16_t *scale = (uint16_t *)to.scales + to.place(in_page, layout.n_groups, g);
    *scale = to.bits == 8 ? to_int8(x + 32 * g, q) : to_int4(x + 32 * g, q);
    if (to.bits == 8)
      for (int i = 0; i < 32; ++i) to.data[to.place(in_page, d, 32 * g + i)] = (uint8_t)q[i];
    else
      for (int i = 0; i < 16; ++i)
        to.data[to.place(in_page, d / 2, 16 * g + i)] = (uint8_t)((q[i] + 8) | (q[16 + i] + 8) << 4);
  }
}

}  // namespace

void KVCache::write(const Kernels &kernels, int32_t layer, int32_t head, int32_t slot, const float *keys,
                    const float *values) {
  const KVLayer &of = shape_.layers[(size_t)layer];
  const int32_t d = of.head_dim, in_page = slot % PAGE_TOKENS;
  const KVLayout &l = of.layout;
  uint8_t *base = at(slot, of.offset(head));
  if (l.bits == 16) {
    uint16_t *k = (uint16_t *)base + key_place(in_page, d, 0),
             *v = (uint16_t *)(base + l.values) + value_place(in_page, d, 0);
    kernels.to_halves(values, d, v);
    uint16_t halves[MAX_PACKED_HEAD];
    for (int32_t begin = 0; begin < d; begin += MAX_PACKED_HEAD) {
      const int32_t n = std::min(d - begin, MAX_PACKED_HEAD);
      kernels.to_halves(keys + begin, n, halves);
      for (int32_t i = 0; i < n; ++i) k[(begin + i) * KEY_BLOCK] = halves[i];
    }
    return;
  }
  float x[MAX_PACKED_HEAD];
  memcpy(x, keys, (size_t)d * sizeof(float));
  if (l.rotated) hadamard(x, d, 1);
  write_packed(l, {l.bits, base, base + l.key_scales, base + l.key_outliers, base + l.key_places, key_place}, in_page,
               d, x);
  memcpy(x, values, (size_t)d * sizeof(float));
  if (l.values_rotated) hadamard(x, d, 1);
  write_packed(l,
               {l.value_bits, base + l.values, base + l.value_scales, base + l.value_outliers, base + l.value_places,
                value_place},
               in_page, d, x);
}

void KVCache::write_rotation(int32_t slot, const float *cos_sin) {
  float *to = (float *)at(slot, shape_.rotations);
  for (int32_t i = 0; i < shape_.n_rot; ++i) to[key_place(slot % PAGE_TOKENS, shape_.n_rot, i)] = cos_sin[i];
}

// Call visitor(address, bytes) for every piece of n numbers of one token.
template <class Visit>
static void visit_keys(uint8_t *piece, int32_t in_page, int64_t n, int64_t size, Visit visitor) {
  for (int64_t i = 0; i < n; ++i) visitor(piece + key_place(in_page, n, i) * size, size);
}

// Call visitor(address, bytes) for every piece of one token's keys and values of a head, always in the same order.
template <class Visit>
void KVCache::visit_head(const KVLayer &of, int32_t head, int32_t slot, Visit visitor) const {
  const int32_t in_page = slot % PAGE_TOKENS;
  const auto of_keys = [&](uint8_t *piece, int64_t n, int64_t size) { visit_keys(piece, in_page, n, size, visitor); };
  const auto of_values = [&](uint8_t *piece, int64_t n, int64_t size) {
    visitor(piece + value_place(in_page, n, 0) * size, n * size);
  };
  const KVLayout &l = of.layout;
  const int64_t size = l.bits == 16 ? 2 : 1, d = of.head_dim;
  uint8_t *base = at(slot, of.offset(head));
  of_keys(base, l.bits == 4 ? d / 2 : d, size);
  of_values(base + l.values, l.value_bits == 4 ? d / 2 : d, size);
  of_keys(base + l.key_scales, l.n_groups, 2);
  of_values(base + l.value_scales, l.n_groups, 2);
  of_keys(base + l.key_outliers, l.n_outliers, 2);
  of_values(base + l.value_outliers, l.n_outliers, 2);
  of_keys(base + l.key_places, l.n_outliers, 1);
  of_values(base + l.value_places, l.n_outliers, 1);
}

// Do so for all heads of all layers, and for the rotations.
template <class Visit>
void KVCache::visit(int32_t slot, Visit visitor) const {
  for (const KVLayer &of : shape_.layers)
    for (int32_t head = 0; head < of.n_head_kv; ++head) visit_head(of, head, slot, visitor);
  visit_keys(at(slot, shape_.rotations), slot % PAGE_TOKENS, shape_.n_rot, sizeof(float), visitor);
}

int64_t KVCache::token_bytes() const {
  return shape_.page_bytes() / PAGE_TOKENS;
}

void KVCache::copy_token(int32_t from, int32_t to) {
  std::vector<uint8_t> bytes((size_t)token_bytes());
  uint8_t *at = bytes.data();
  visit(from, [&](uint8_t *p, int64_t n) { memcpy(at, p, (size_t)n), at += n; });
  at = bytes.data();
  visit(to, [&](uint8_t *p, int64_t n) { memcpy(p, at, (size_t)n), at += n; });
}

void KVCache::move(const int32_t *source, int32_t n, int32_t start) {
  if (n > 0) prepare(start, start + n);
  for (int32_t i = 0; i < n; ++i)
    if (source[i] != start + i) copy_token(source[i], start + i);
}

void KVCache::gather(const KVCache &other, const int32_t *slots, int32_t n, int32_t start) {
  std::vector<uint8_t> bytes((size_t)token_bytes());
  prepare(start, start + n);
  for (const KVLayer &of : shape_.layers)
    for (int32_t head = 0; head < of.n_head_kv; ++head)
      for (int32_t i = 0; i < n; ++i) {
        uint8_t *at = bytes.data();
        other.visit_head(of, head, *slots++, [&](uint8_t *p, int64_t size) { memcpy(at, p, (size_t)size), at += size; });
        at = bytes.data();
        visit_head(of, head, start + i, [&](uint8_t *p, int64_t size) { memcpy(p, at, (size_t)size), at += size; });
      }
}

void KVCache::save(int32_t n_tokens, uint8_t *target) const {
  for (int32_t slot = 0; slot < n_tokens; ++slot)
    visit(slot, [&](uint8_t *p, int64_t n) { memcpy(target, p, (size_t)n), target += n; });
}

void KVCache::load(int32_t n_tokens, const uint8_t *source) {
  if (n_tokens > 0) prepare(0, n_tokens);
  for (int32_t slot = 0; slot < n_tokens; ++slot)
    visit(slot, [&](uint8_t *p, int64_t n) { memcpy(p, source, (size_t)n), source += n; });
}

void KVCache::check_pages(int32_t begin, int32_t end, uint64_t n_bytes) const {
  require(begin >= 0 && begin <= end && end <= n_ctx_, "the pages are out of range");
  require(begin % PAGE_TOKENS == 0 && end % PAGE_TOKENS == 0, "the slots are no whole pages");
  require(n_bytes == (uint64_t)((end - begin) / PAGE_TOKENS) * (uint64_t)shape_.page_bytes(),
          "the pages have another size");
}

void KVCache::save_pages(int32_t begin, int32_t end, uint8_t *target) const {
  const size_t n_bytes = (size_t)shape_.page_bytes();
  for (int32_t i = begin / PAGE_TOKENS; n_bytes > 0 && i < end / PAGE_TOKENS; ++i, target += n_bytes)
    memcpy(target, pages_[(size_t)i].get(), n_bytes);
}

void KVCache::load_pages(int32_t begin, int32_t end, const uint8_t *source) {
  const size_t n_bytes = (size_t)shape_.page_bytes();
  for (int32_t i = begin / PAGE_TOKENS; n_bytes > 0 && i < end / PAGE_TOKENS; ++i, source += n_bytes) {
    if (!pages_[(size_t)i] || pages_[(size_t)i].use_count() > 1) pages_[(size_t)i] = new_page((size_t)i);
    memcpy(pages_[(size_t)i].get(), source, n_bytes);
    addresses_[(size_t)i] = pages_[(size_t)i].get();
  }
}

}  // namespace edgedec
