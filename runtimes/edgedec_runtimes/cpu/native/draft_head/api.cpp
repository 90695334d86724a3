// The C interface of draft heads.
#include <algorithm>

#include "api_calls.h"
#include "draft_head/draft_head.h"

using namespace edgedec;

int32_t ec_draft_head_create(ec_model *target, const ec_draft_head_config *config, const ec_config *layers,
                             const int32_t *taps, const int32_t *tokens, const int32_t *windows,
                             ec_draft_head **head) {
  return guarded([&] {
    *head = new ec_draft_head(*target, *config, layers, taps, tokens, windows);
  });
}

ec_model *ec_draft_head_layers(ec_draft_head *head) { return &head->net; }

namespace {

void check_which(const ec_draft_head *head, int32_t which, int32_t n_which, int32_t layer) {
  require(!head->finished && which >= 0 && which < n_which && layer >= 0 && layer < head->config.n_layer,
          "no such matrix or vector of a head, or no such layer");
}

Matrix &matrix_of(ec_draft_head *head, int32_t which, int32_t layer) {
  check_which(head, which, EC_DRAFT_HEAD_N_MATRICES, layer);
  Layer &in_layer = head->net.layers[(size_t)layer];
  static constexpr int32_t of_layer[] = {EC_Q, EC_K, EC_V, EC_ATTN_OUT, EC_GATE, EC_UP, EC_DOWN};
  switch (which) {
    case EC_DRAFT_HEAD_FC: return head->fc;
    case EC_DRAFT_HEAD_OUTPUT: return head->net.output;
    case EC_DRAFT_HEAD_EMBEDDING: return head->embedding;
    case EC_DRAFT_HEAD_JOINT: return head->joint;
    case EC_DRAFT_HEAD_ROWS: return head->made.matrix;
    case EC_DRAFT_HEAD_MARKOV_W1: return head->of_block.markov_w1;
    case EC_DRAFT_HEAD_MARKOV_W2: return head->of_block.markov_w2;
    case EC_DRAFT_HEAD_MARKOV_GATE: return head->of_block.markov_gate;
    case EC_DRAFT_HEAD_MARKOV_JOINT: return head->of_block.markov_joint;
    case EC_DRAFT_HEAD_ATTN_KERNELS: return in_layer.around_attention.kernels;
    case EC_DRAFT_HEAD_FFN_KERNELS: return in_layer.around_ffn.kernels;
    default: return in_layer.matrices[of_layer[which]];
  }
}

std::vector<float> &vector_of(ec_draft_head *head, int32_t which, int32_t layer) {
  check_which(head, which, EC_DRAFT_HEAD_N_VECTORS, layer);
  Layer &in_layer = head->net.layers[(size_t)layer];
  static constexpr int32_t of_layer[] = {EC_EMBEDDING_NORM, EC_ATTN_NORM, EC_FFN_NORM, EC_Q_NORM, EC_K_NORM};
  switch (which) {
    case EC_DRAFT_HEAD_OUTPUT_NORM: return head->net.output_norm;
    case EC_DRAFT_HEAD_FC_NORM: return head->fc_norm;
    case EC_DRAFT_HEAD_FEATURE_NORM: return head->joins ? head->feature_norm : head->of_block.feature_norm;
    case EC_DRAFT_HEAD_PAIR_NORM: return head->embedding_norm;
    case EC_DRAFT_HEAD_ROPE_DIVISORS: return head->rope_divisors;
    case EC_DRAFT_HEAD_ROWS_KEPT: return head->made.kept;
    case EC_DRAFT_HEAD_ROWS_BASE: return head->made.base;
    case EC_DRAFT_HEAD_MASK: return head->of_block.mask;
    case EC_DRAFT_HEAD_MARKOV_GATE_BIAS: return head->of_block.markov_gate_bias;
    case EC_DRAFT_HEAD_MARKOV_JOINT_BIAS: return head->of_block.markov_joint_bias;
    case EC_DRAFT_HEAD_CONFIDENCE: return head->of_block.confidence;
    case EC_DRAFT_HEAD_CONFIDENCE_BIAS: return head->of_block.confidence_bias;
    case EC_DRAFT_HEAD_ATTN_KERNELS_BASE: return in_layer.around_attention.base;
    case EC_DRAFT_HEAD_FFN_KERNELS_BASE: return in_layer.around_ffn.base;
    default: return in_layer.vectors[of_layer[which]];
  }
}

DraftHeadState &state_of(const ec_session *session) {
  require(session->draft_head != nullptr, "no draft head follows the session");
  return *session->draft_head;
}

}  // namespace

int32_t ec_draft_head_set_matrix(ec_draft_head *head, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                                 int64_t n_cols, const void *tiles, uint64_t n_tile_bytes) {
  return guarded([&] {
    Matrix &matrix = matrix_of(head, which, layer);
    check_tiles(type, n_rows, n_cols, n_tile_bytes);
    require(tiles != nullptr, "a matrix has no tiles");
    matrix = {type, n_rows, n_cols, (const uint8_t *)tiles, head->target.ahead_of(type)};
  });
}

int32_t ec_draft_head_set_vector(ec_draft_head *head, int32_t which, int32_t layer, const float *values, int64_t n) {
  return guarded([&] {
    require(n >= 0 && n <= 1 << 24, "a vector is too long");
    vector_of(head, which, layer).assign(values, values + n);
  });
}

int32_t ec_draft_head_finish(ec_draft_head *head) {
  return guarded([&] {
    require(!head->finished, "the head is finished already");
    head->finish();
  });
}

void ec_draft_head_destroy(ec_draft_head *head) { delete head; }

int32_t ec_session_follow(ec_session *session, ec_draft_head *head) {
  return guarded([&] {
    require(head == nullptr || (head->finished && &head->target == session->model), "the head is of another model");
    session->draft_head = head == nullptr ? nullptr : head->follow(session->cache.n_ctx());
    if (session->draft_head) session->draft_head->attach(*session);
  });
}

int32_t ec_session_take(const ec_item *item) {
  return guarded([&] {
    if (!item->session->draft_head) return;
    const ec_session &session = *item->session;
    const ec_draft_head &head = session.draft_head->head();
    require(session.model->elsewhere, "the session's own library evaluates its text");
    require(item->n_past >= 0 && item->n_rows >= 0 && item->n_rows <= session.cache.n_ctx() - item->n_past,
            "the rows are beyond the session's length");
    const int32_t *tokens = item->n_groups == 1 && item->groups->n_rows == item->n_rows ? item->groups->tokens : nullptr;
    require(tokens != nullptr && item->tapped != nullptr && item->n_taps == (int32_t)head.taps.size(),
            "the rows lack tokens or taps");
    for (int32_t i = 0; i < item->n_rows; ++i)
      require(tokens[i] >= 0 && tokens[i] < session.model->config.n_vocab, "a token is out of range");
    session.draft_head->take(*item);
  });
}

namespace {

// Call body(), which drafts for some sessions. The target's weights, whose embeddings are read, may be mapped.
template <class Body>
int32_t drafting(const ec_draft_item *items, int32_t n, Body body) {
  return guarded([&] {
    require(n >= 0, "the number of texts is negative");
    if (n == 0) return;
    for (int32_t i = 0; i < n; ++i)
      require(items[i].session != nullptr && items[i].session->model == items[0].session->model,
              "the texts of a draft are of several models");
    const ec_mapping *mapping = items[0].session->model->mapping;
    const FaultsUnblocked unblocked;
    if (mapping != nullptr) mapping->check();
    body();
    if (mapping != nullptr) mapping->check();
  });
}

}  // namespace

int32_t ec_draft_scores(ec_draft_item *items, int32_t n) {
  return drafting(items, n, [&] {
    std::vector<DraftHeadState *> states;
    std::vector<ec_draft_item *> known;
    for (int32_t i = 0; i < n; ++i) {
      DraftHeadState *state = items[i].session->draft_head.get();
      const auto laid_out = [&] {
        return items[i].n_past < 0 ? state->lay_out_next(items[i].token)
                                   : state->lay_out(items[i].n_past, items[i].token, EC_MOST_BLOCK);
      };
      items[i].n_found = state != nullptr && laid_out();
      if (items[i].n_found == 0) continue;
      states.push_back(state);
      known.push_back(&items[i]);
    }
    const float *scores = DraftHeadState::read(states);
    for (ec_draft_item *item : known) {
      const int32_t n_vocab = item->session->draft_head->head().config.n_vocab;
      std::copy(scores, scores + n_vocab, item->scores);
      scores += n_vocab;
    }
  });
}

int32_t ec_draft_chains(ec_draft_item *items, int32_t n) {
  return drafting(items, n, [&] { draft_chains(items, n); });
}

int32_t ec_draft_branches(ec_session *session, const int32_t *tokens, const int32_t *parents, int32_t n_nodes,
                          int32_t n_new, float *scores, int32_t *n_found) {
  ec_draft_item item{};
  item.session = session;
  return drafting(&item, 1, [&] {
    require(n_new > 0 && n_new <= n_nodes, "the number of nodes is out of range");
    for (int32_t i = 0; i < n_nodes; ++i)
      require(tokens[i] >= 0 && tokens[i] < session->model->config.n_vocab && parents[i] >= -1 && parents[i] < i &&
                  parents[i] < n_nodes - n_new,
              "a token is out of range, or a node follows one that was not read");
    *n_found = session->draft_head != nullptr &&
               session->draft_head->read_branches(tokens, parents, n_nodes, n_new, scores);
  });
}

int32_t ec_draft_place(ec_session *session, const int32_t *n_behind, int32_t n, double seconds) {
  return guarded([&] {
    require(n >= 0 && n <= EC_MOST_BLOCK && seconds >= 0, "the places of a head's rows are out of range");
    if (session->draft_head) session->draft_head->place(n_behind, n, seconds);
  });
}

int32_t ec_draft_added_rows(const ec_session *session) {
  return session->draft_head ? session->draft_head->n_added() : 0;
}

double ec_draft_read_seconds(const ec_session *session) {
  return session->draft_head ? session->draft_head->read_seconds : 0.0;
}

uint64_t ec_draft_state_bytes(const ec_session *session) {
  return session->draft_head ? session->draft_head->state_bytes() : 0;
}

uint64_t ec_draft_saved_bytes(const ec_session *session, int32_t n_tokens) {
  return session->draft_head ? session->draft_head->saved_bytes(n_tokens) : 0;
}

uint64_t ec_draft_page_bytes(const ec_session *session) {
  return session->draft_head ? session->draft_head->page_bytes() : 0;
}

int32_t ec_draft_save_pages(ec_session *session, int32_t begin, int32_t end, void *target, uint64_t n_bytes,
                            int32_t *saved) {
  return guarded([&] {
    *saved = state_of(session).save_pages(begin, end, (uint8_t *)target, n_bytes);
  });
}

int32_t ec_draft_load_pages(ec_session *session, int32_t begin, int32_t end, const void *source, uint64_t n_bytes) {
  return guarded([&] {
    state_of(session).load_pages(begin, end, (const uint8_t *)source, n_bytes);
  });
}

int32_t ec_draft_save(ec_session *session, int32_t n_tokens, void *target, uint64_t n_bytes) {
  return guarded([&] {
    DraftHeadState &state = state_of(session);
    require(n_tokens >= 0 && n_bytes == state.saved_bytes(n_tokens), "the target has another size");
    state.save(n_tokens, (uint8_t *)target);
  });
}

int32_t ec_draft_load(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes) {
  return guarded([&] {
    DraftHeadState &state = state_of(session);
    require(n_tokens >= 0 && n_bytes == state.saved_bytes(n_tokens), "the source has another size");
    state.load(n_tokens, (const uint8_t *)source);
  });
}
