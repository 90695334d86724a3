// The C interface of sessions: opening, forking, moving, saving and loading.
#include <string.h>

#include <algorithm>
#include <memory>
#include <string>

#include "api_calls.h"
#include "draft_head/draft_head.h"

using namespace edgedec;

namespace {

void check_tokens(const ec_session *session, int32_t n_tokens) {
  require(n_tokens >= 0 && n_tokens <= session->cache.n_ctx(), "the session does not hold so many tokens");
  if (session->cache.shape().page_bytes() == 0) return;
  for (int32_t i = 0; i < (n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS; ++i)
    require(session->cache.pages()[i] != nullptr, "the session does not hold so many tokens");
}

uint64_t kv_bytes(const ec_session *session, int32_t n_tokens) {
  return (uint64_t)session->cache.token_bytes() * (uint64_t)n_tokens;
}

uint64_t state_bytes(const ec_session *session, int32_t n_tokens, bool before) {
  return session->notes.saved_bytes(n_tokens) + session->columns.saved_bytes(n_tokens, before) +
         session->states.saved_bytes(before);
}

// Write what the session holds of the first n_tokens beside keys and values; with `before`, also what it takes to go
// back without evaluating all rows again.
void save_state(ec_session *session, int32_t n_tokens, const int32_t *places, uint8_t *target, bool before) {
  ec_item end{};
  end.session = session, end.n_past = n_tokens, end.places = places;
  require(renew(end, nullptr) == Outcome::done, "the session's rows could not be evaluated again");
  if (session->model->mapping != nullptr) session->model->mapping->check();
  uint8_t *columns = target + session->notes.saved_bytes(n_tokens);
  session->notes.save(n_tokens, target);
  session->columns.save(n_tokens, columns, before);
  session->states.save(*session->model->kernels, session->notes, n_tokens,
                       columns + session->columns.saved_bytes(n_tokens, before), before);
}

void load_state(ec_session *session, int32_t n_tokens, const uint8_t *source, bool before) {
  const uint8_t *columns = source + session->notes.saved_bytes(n_tokens);
  RowNotes loaded(session->notes, 0);
  loaded.load(n_tokens, source);
  session->states.load(n_tokens, columns + session->columns.saved_bytes(n_tokens, before), before);
  session->columns.load(n_tokens, columns, before);
  session->notes = std::move(loaded);
}

}  // namespace

int32_t ec_session_open(ec_model *model, int32_t n_ctx, int32_t kv_type, ec_session **session) {
  return guarded([&] {
    require(model->finished && n_ctx >= 1 && n_ctx <= 1 << 24, "a session's length is out of range");
    require(kv_type >= EC_KV_F16 && kv_type <= EC_KV_INT8_INT4, "no such KV type");
    *session = new ec_session(model, n_ctx, kv_type);
  });
}

int32_t ec_session_fork(ec_session *session, int32_t n_tokens, ec_session **fork) {
  return guarded([&] {
    check_tokens(session, n_tokens);
    session->cache.trim(n_tokens);  // pages behind them, of a longer text before, are freed
    std::unique_ptr<ec_session> twin(new ec_session(*session, n_tokens));
    if (session->draft_head) {
      twin->draft_head = session->draft_head->fork(n_tokens);
      twin->draft_head->attach(*twin);
    }
    *fork = twin.release();
  });
}

int32_t ec_session_move(ec_session *session, const int32_t *source, int32_t n, int32_t start) {
  return guarded([&] {
    require(n >= 0 && start >= 0 && n <= session->cache.n_ctx() - start, "the slots are out of range");
    for (int32_t i = 0; i < n; ++i) {
      require(source[i] >= start + i && (i == 0 || source[i] > source[i - 1]), "the slots are not in order");
      require(source[i] < session->cache.n_ctx(), "the slots are out of range");
      check_tokens(session, source[i] + 1);
    }
    session->cache.move(source, n, start);
    session->notes.move(source, n, start);
    session->columns.move(source, n, start);
    session->states.move(source, n, start);
    if (session->draft_head) session->draft_head->move(source, n, start);
  });
}

int32_t ec_session_gathered_heads(const ec_session *session) {
  const KVShape &shape = session->cache.shape();
  if (session->model->remembers() || shape.n_rot != 0 || shape.layers.size() != session->model->layers.size()) return 0;
  for (const Layer &layer : session->model->layers)
    if (layer.window != 0) return 0;
  const int32_t n_heads = shape.layers.front().n_head_kv;
  for (const KVLayer &layer : shape.layers)
    if (layer.n_head_kv != n_heads) return 0;
  return n_heads;
}

int32_t ec_session_gather(ec_session *session, const ec_session *source, const int32_t *slots, int32_t n,
                          int32_t start) {
  return guarded([&] {
    const KVShape &shape = session->cache.shape();
    const int64_t page_bytes = source->cache.shape().page_bytes();  // each type has its own
    require(session != source && source->model == session->model && page_bytes == shape.page_bytes(),
            "keys and values are those of another session of the same model");
    const int64_t n_heads = ec_session_gathered_heads(session);
    require(n_heads > 0, "the heads of this model can't see slots of their own");
    require(n >= 1 && start >= 0 && n <= session->cache.n_ctx() - start, "the slots are out of range");
    const auto [least, most] = std::minmax_element(slots, slots + (int64_t)shape.layers.size() * n_heads * n);
    require(*least >= 0 && *most < source->cache.n_ctx(), "the slots are out of range");
    check_tokens(session, start);
    check_tokens(source, *most + 1);
    session->cache.gather(source->cache, slots, n, start);
  });
}

uint64_t ec_session_saved_bytes(const ec_session *session, int32_t n_tokens) {
  if (n_tokens < 0) return 0;
  return kv_bytes(session, n_tokens) + state_bytes(session, n_tokens, true);
}

int32_t ec_session_save(ec_session *session, int32_t n_tokens, const int32_t *places, void *target, uint64_t n_bytes) {
  return guarded([&] {
    check_tokens(session, n_tokens);
    require(n_bytes == ec_session_saved_bytes(session, n_tokens), "the target has another size");
    save_state(session, n_tokens, places, (uint8_t *)target + kv_bytes(session, n_tokens), true);
    session->cache.save(n_tokens, (uint8_t *)target);
  });
}

int32_t ec_session_load(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes) {
  return guarded([&] {
    require(n_tokens >= 0 && n_tokens <= session->cache.n_ctx(), "the session does not hold so many tokens");
    require(n_bytes == ec_session_saved_bytes(session, n_tokens), "the source has another size");
    load_state(session, n_tokens, (const uint8_t *)source + kv_bytes(session, n_tokens), true);
    session->cache.load(n_tokens, (const uint8_t *)source);
  });
}

uint64_t ec_session_state_bytes(const ec_session *session, int32_t n_tokens) {
  return n_tokens < 0 ? 0 : state_bytes(session, n_tokens, false);
}

int32_t ec_session_save_state(ec_session *session, int32_t n_tokens, const int32_t *places, void *target,
                              uint64_t n_bytes) {
  return guarded([&] {
    check_tokens(session, n_tokens);
    require(n_bytes == ec_session_state_bytes(session, n_tokens), "the target has another size");
    save_state(session, n_tokens, places, (uint8_t *)target, false);
  });
}

int32_t ec_session_load_state(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes) {
  return guarded([&] {
    require(n_tokens >= 0 && n_tokens <= session->cache.n_ctx(), "the session does not hold so many tokens");
    require(n_bytes == ec_session_state_bytes(session, n_tokens), "the source has another size");
    load_state(session, n_tokens, (const uint8_t *)source, false);
  });
}

int32_t ec_session_held_before(const ec_session *session, int32_t n_tokens) {
  if (n_tokens < 0 || n_tokens > session->cache.n_ctx()) return 0;
  return std::min(session->states.held_before(n_tokens), session->columns.held_before(n_tokens));
}

uint64_t ec_session_page_bytes(const ec_session *session) { return (uint64_t)session->cache.shape().page_bytes(); }

int32_t ec_session_save_pages(const ec_session *session, int32_t begin, int32_t end, void *target, uint64_t n_bytes) {
  return guarded([&] {
    session->cache.check_pages(begin, end, n_bytes);
    check_tokens(session, end);
    if (session->model->mapping != nullptr) session->model->mapping->check();
    session->cache.save_pages(begin, end, (uint8_t *)target);
  });
}

int32_t ec_session_load_pages(ec_session *session, int32_t begin, int32_t end, const void *source, uint64_t n_bytes) {
  return guarded([&] {
    session->cache.check_pages(begin, end, n_bytes);
    session->cache.load_pages(begin, end, (const uint8_t *)source);
  });
}

uint64_t ec_sum(const void *data, uint64_t n_bytes) {
  constexpr uint64_t factor = 0x9E3779B97F4A7C15u;
  uint64_t lanes[4] = {1, 2, 3, 4}, word[4];
  const uint8_t *at = (const uint8_t *)data;
  for (uint64_t left = n_bytes; left > 0;) {
    const uint64_t n = left < sizeof word ? left : sizeof word;
    if (n < sizeof word) memset(word, 0, sizeof word);
    memcpy(word, at, (size_t)n);
    for (int i = 0; i < 4; ++i) {
      lanes[i] = (lanes[i] ^ word[i]) * factor;
      lanes[i] ^= lanes[i] >> 29;
    }
    at += n, left -= n;
  }
  uint64_t sum = n_bytes;
  for (const uint64_t lane : lanes) sum = (sum ^ lane) * factor, sum ^= sum >> 32;
  return sum;
}

uint64_t ec_session_vector_bytes(const ec_session *session, int32_t n_tokens) {
  return n_tokens < 0 ? 0 : session->notes.vector_bytes(n_tokens);
}

int32_t ec_session_save_vectors(const ec_session *session, int32_t n_tokens, void *target, uint64_t n_bytes) {
  return guarded([&] {
    require(n_bytes == ec_session_vector_bytes(session, n_tokens), "the target has another size");
    session->notes.save_vectors(n_tokens, (uint8_t *)target);
  });
}

int32_t ec_session_load_vectors(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes) {
  return guarded([&] {
    session->notes.load_vectors(n_tokens, (const uint8_t *)source, n_bytes);
  });
}

void ec_session_close(ec_session *session) { delete session; }
