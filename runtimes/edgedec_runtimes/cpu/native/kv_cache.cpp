#include "kv_cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "tensor_types.h"

namespace edgedec {
namespace {

std::shared_ptr<uint8_t> new_page(int64_t n_bytes) {
  // calloc: zero pages of the system, so that a page takes memory only where it is written
  uint8_t *page = (uint8_t *)calloc((size_t)n_bytes, 1);
  if (page == nullptr) throw std::bad_alloc();
  return std::shared_ptr<uint8_t>(page, free);
}

// Round 32 floats to int8 with one scale.
float to_int8(const float *x, int stride_out, int8_t *out) {
  float peak = 0.0f;
  for (int i = 0; i < 32; ++i) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
  const float scale = peak / 127.0f, inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float v = nearbyintf(x[i] * inverse);
    out[i * stride_out] = (int8_t)(v < 127.0f ? (v > -127.0f ? v : -127.0f) : 127.0f);  // 127 for what is no number
  }
  return scale;
}

}  // namespace

KVCache::KVCache(const KVCache &other, int32_t n_tokens) : KVCache(other.shape_, other.n_ctx_) {
  for (size_t i = 0; i < (size_t)(n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS; ++i) {
    pages_[i] = other.pages_[i];
    addresses_[i] = pages_[i].get();
  }
}

void KVCache::prepare(int32_t begin, int32_t end) {
  for (int32_t i = begin / PAGE_TOKENS; i <= (end - 1) / PAGE_TOKENS; ++i) {
    if (pages_[i] && pages_[i].use_count() == 1) continue;
    std::shared_ptr<uint8_t> page = new_page(shape_.page_bytes());
    if (pages_[i]) memcpy(page.get(), pages_[i].get(), (size_t)shape_.page_bytes());
    pages_[i] = page;
    addresses_[i] = page.get();
  }
}

void KVCache::write(int32_t layer, int32_t head, int32_t slot, const float *keys, const float *values) {
  const int32_t d = shape_.head_dim, in_page = slot % PAGE_TOKENS, block = in_page / KEY_BLOCK, lane = in_page % KEY_BLOCK;
  uint8_t *base = pages_[slot / PAGE_TOKENS].get() + shape_.offset(layer, head);
  if (!shape_.int8) {
    uint16_t *k = (uint16_t *)base + (int64_t)block * d * KEY_BLOCK + lane;
    uint16_t *v = (uint16_t *)base + (int64_t)PAGE_TOKENS * d + (int64_t)in_page * d;
    for (int32_t i = 0; i < d; ++i) {
      k[i * KEY_BLOCK] = float_to_half(keys[i]);
      v[i] = float_to_half(values[i]);
    }
    return;
  }
  int8_t *k = (int8_t *)base + (int64_t)block * d * KEY_BLOCK + lane;
  int8_t *v = (int8_t *)base + (int64_t)PAGE_TOKENS * d + (int64_t)in_page * d;
  float *key_scales = (float *)(base + 2 * (int64_t)PAGE_TOKENS * d), *value_scales = key_scales + PAGE_TOKENS * (d / 32);
  for (int32_t g = 0; g < d / 32; ++g) {
    key_scales[(block * (d / 32) + g) * KEY_BLOCK + lane] = to_int8(keys + 32 * g, KEY_BLOCK, k + 32 * g * KEY_BLOCK);
    value_scales[in_page * (d / 32) + g] = to_int8(values + 32 * g, 1, v + 32 * g);
  }
}

// Call visitor(address, bytes) for every piece of one token, always in the same order.
template <class Visit>
void KVCache::visit(int32_t slot, Visit visitor) const {
  const int32_t d = shape_.head_dim, in_page = slot % PAGE_TOKENS, block = in_page / KEY_BLOCK, lane = in_page % KEY_BLOCK;
  const int32_t size = shape_.int8 ? 1 : 2, groups = d / 32;
  for (int32_t layer = 0; layer < shape_.n_layer; ++layer)
    for (int32_t head = 0; head < shape_.n_head_kv; ++head) {
      uint8_t *base = pages_[slot / PAGE_TOKENS].get() + shape_.offset(layer, head);
      for (int32_t i = 0; i < d; ++i) visitor(base + ((int64_t)(block * d + i) * KEY_BLOCK + lane) * size, size);
      visitor(base + (int64_t)PAGE_TOKENS * d * size + (int64_t)in_page * d * size, d * size);
      if (!shape_.int8) continue;
      uint8_t *scales = base + 2 * (int64_t)PAGE_TOKENS * d;
      for (int32_t g = 0; g < groups; ++g) visitor(scales + 4 * ((block * groups + g) * KEY_BLOCK + lane), 4);
      visitor(scales + 4 * (PAGE_TOKENS * groups + in_page * groups), 4 * groups);
    }
}

int64_t KVCache::token_bytes() const {
  return shape_.page_bytes() / PAGE_TOKENS;
}

void KVCache::copy_token(int32_t from, int32_t to) {
  std::vector<uint8_t> bytes((size_t)token_bytes());
  uint8_t *at = bytes.data();
  visit(from, [&](uint8_t *p, int n) { memcpy(at, p, (size_t)n), at += n; });
  at = bytes.data();
  visit(to, [&](uint8_t *p, int n) { memcpy(p, at, (size_t)n), at += n; });
}

void KVCache::move(const int32_t *source, int32_t n, int32_t start) {
  if (n > 0) prepare(start, start + n);
  for (int32_t i = 0; i < n; ++i)
    if (source[i] != start + i) copy_token(source[i], start + i);
}

void KVCache::save(int32_t n_tokens, uint8_t *target) const {
  for (int32_t slot = 0; slot < n_tokens; ++slot)
    visit(slot, [&](uint8_t *p, int n) { memcpy(target, p, (size_t)n), target += n; });
}

void KVCache::load(int32_t n_tokens, const uint8_t *source) {
  if (n_tokens > 0) prepare(0, n_tokens);
  for (int32_t slot = 0; slot < n_tokens; ++slot)
    visit(slot, [&](uint8_t *p, int n) { memcpy(p, source, (size_t)n), source += n; });
}

}  // namespace edgedec
