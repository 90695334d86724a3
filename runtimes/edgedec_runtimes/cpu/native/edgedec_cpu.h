/* The C interface of edgedec's CPU runtime: decoder-only transformers on weights in tiles (weights/tiles.h).
 *
 * The library opens no file: the caller passes pointers with their sizes, and every size is checked. A function that
 * can fail returns EC_OK or an error code; ec_last_error() returns the reason of the last failure in the calling
 * thread. One thread at a time may use an object. Forwards of different models wait for the threads that they share.
 */
#ifndef EDGEDEC_CPU_H
#define EDGEDEC_CPU_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EC_API __declspec(dllexport)
#else
#define EC_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EC_ABI_VERSION 29

enum { EC_OK = 0, EC_INVALID = 1, EC_NO_MEMORY = 2, EC_CANCELLED = 3, EC_UNREADABLE = 4, EC_NOT_FINITE = 5 };

/* A tensor type is ggml's number of it. */

/* The matrices of a model; those from EC_Q on exist in each layer. A layer with a mixture of experts has EC_ROUTER and
 * the matrices of its experts, in each of which expert e is the rows from e * n_rows / n_expert on; its EC_GATE, EC_UP
 * and EC_DOWN are those of a shared expert, which all rows go through, and may be absent. Without EC_UP_EXPERTS, the
 * rows of each expert in EC_GATE_EXPERTS are those of its gate and then those of its up. A layer without EC_V has its
 * keys, before their norm, as values. */
enum {
  EC_TOKEN_EMBD, EC_OUTPUT, EC_Q, EC_K, EC_V, EC_ATTN_OUT, EC_GATE, EC_UP, EC_DOWN,
  EC_ROUTER,        /* [n_expert][n_embd] */
  EC_SHARED_ROUTER, /* [1][n_embd], the score whose sigmoid multiplies the shared expert's output; may be absent */
  EC_GATE_EXPERTS,
  EC_UP_EXPERTS,
  EC_DOWN_EXPERTS,
  /* What layers get of a token (n_per_layer): the first two exist once, the others in each layer. */
  EC_PER_LAYER_ROWS, /* [n_vocab * n_layer][n_per_layer], of which a forward reads n_layer rows for a token */
  EC_PER_LAYER_PROJECTION, /* [n_layer * n_per_layer][n_embd] */
  EC_PER_LAYER_GATE,       /* [n_per_layer][n_embd] */
  EC_PER_LAYER_OUT,        /* [n_embd][n_per_layer] */
  /* of a layer with a recurrent state: */
  EC_MIX,       /* [2 * n_state_key_head * n_state_key + n_state_head * n_state_value][n_embd], what the convolution goes
                   over: queries, keys, values; by EC_RULE_SPACE values, keys, queries */
  EC_MIX_GATE,  /* [n_state_head * n_state_value][n_embd], whose SiLU multiplies the result */
  EC_MIX_ALPHA, /* [n_state_head][n_embd], of how much of the state is kept; by EC_RULE_DELTA without EC_MIX_BETA twice
                   as many rows, those of a key head together: of its heads' beta, then of their alpha */
  EC_MIX_BETA,  /* [n_state_head][n_embd], of how much is learned (EC_RULE_DELTA) */
  EC_MIX_OUT,   /* [n_embd][n_state_head * n_state_value] */
  EC_N_MATRICES
};

/* The vectors of a model (float32). Those from EC_ATTN_NORM on exist in each layer; all of these may be absent. */
enum {
  EC_OUTPUT_NORM,
  EC_ATTN_NORM,
  EC_FFN_NORM,
  EC_Q_BIAS,
  EC_K_BIAS,
  EC_V_BIAS,
  EC_Q_NORM,
  EC_K_NORM,
  EC_POST_ATTN_NORM,
  EC_POST_FFN_NORM,
  EC_EMBEDDING_NORM, /* of a draft head's layer */
  EC_ATTN_OUT_BIAS,  /* [n_embd] */
  EC_SINKS,          /* [n_head], a score of each head that has a part in the softmax and no value */
  EC_EXPERT_BIAS,    /* [n_expert], added to the gates of experts only to choose them */
  EC_CONVOLUTION,    /* [n_embd][length], the kernels of a layer with a short convolution (gated: LFM2) in place of
                        attention: EC_Q, EC_K and EC_V are then C, B and x, of n_embd rows each, and C * conv(B * x)
                        goes to EC_ATTN_OUT; of a layer with a recurrent state [rows of EC_MIX][length] */
  EC_ROUTER_BIAS,    /* [n_expert], of the scores of experts */
  EC_GATE_EXPERTS_BIAS, /* [n_expert][n_ff_expert] */
  EC_UP_EXPERTS_BIAS,   /* the same */
  EC_DOWN_EXPERTS_BIAS, /* [n_expert][n_embd] */
  EC_PER_LAYER_NORM,      /* [n_per_layer], of each layer's part of EC_PER_LAYER_PROJECTION; exists once */
  EC_PER_LAYER_POST_NORM, /* behind EC_PER_LAYER_OUT */
  EC_LAYER_SCALE,         /* [1], what the hidden state is multiplied by behind the layer */
  EC_ROUTER_NORM,         /* before the router, and the next one before experts, where they don't read what EC_GATE does */
  EC_EXPERTS_NORM,
  EC_POST_SHARED_NORM, /* behind the shared expert, and the next one behind the experts, before they are added */
  EC_POST_EXPERTS_NORM,
  EC_EXPERT_SCALES, /* [n_expert], what the gates of experts are multiplied by */
  EC_STATE_BIAS, /* [n_state_head], added to alpha */
  EC_STATE_RATE, /* [n_state_head], at most 0: e^(rate * softplus(alpha)) of the state is kept */
  EC_STATE_NORM, /* [n_state_value], of each head of the result; by EC_RULE_SPACE [n_state_head * n_state_value], a norm
                    over the heads of a key together, which may be absent */
  EC_CONVOLUTION_BIAS, /* [rows of EC_MIX], this and the next of EC_RULE_SPACE */
  EC_STATE_PASSED,     /* [n_state_head], how much of a value is added to the result */
  EC_N_VECTORS
};

/* The operations that the time of a forward is divided into. */
enum {
  EC_OP_NORM,
  EC_OP_QKV,
  EC_OP_ROPE, /* biases, norms of heads, rotation, writing keys and values */
  EC_OP_ATTENTION,
  EC_OP_ATTN_OUT,
  EC_OP_GATE_UP,
  EC_OP_DOWN,
  EC_OP_LOGITS,
  EC_OP_OTHER, /* embedding, barriers between layers */
  EC_N_OPERATIONS
};

/* How keys and values are stored: as halves; or in groups of 32 with a half as scale, as int8, as 4 bits, or as 4 bits
 * with the largest elements (one of 16) as halves beside them. The last three take a head_dim that is a multiple of 32
 * and at most 512. */
enum { EC_KV_F16 = 0, EC_KV_INT8 = 1, EC_KV_INT4 = 2, EC_KV_GEAR = 3 };

/* How the gates of experts come from their scores: a softmax over all experts, the sigmoid of each, or a softmax over
 * those that were chosen. */
enum { EC_GATING_SOFTMAX = 0, EC_GATING_SIGMOID = 1, EC_GATING_CHOSEN = 2 };

/* What a gate g becomes in a feed-forward block, before it multiplies: g * sigmoid(g), the tanh form of GELU, the
 * greater of g and 0, or the square of that. */
enum { EC_SILU = 0, EC_GELU = 1, EC_RELU = 2, EC_RELU2 = 3, EC_GELU_QUICK = 4 };

/* The shape of a model, and the switches by which architectures differ. */
typedef struct ec_config {
  int32_t n_vocab;
  int32_t n_embd;
  int32_t n_layer;
  int32_t rope_interleaved; /* pairs are neighbours (1) or halves of the rotated part (0) */
  int32_t activation;       /* of gates: EC_SILU ... */
  int32_t ungated;          /* feed-forward blocks have no gate: `up` itself goes through the activation (1) */
  int32_t wide_norms;       /* norms of queries and keys are over all heads together (1) or over each head (0) */
  int32_t value_norm;       /* each head of the values is normed, without a weight (1), or not (0) */
  int32_t n_per_layer;      /* elements that each layer gets of a token; 0: it gets none. Items then have tokens */
  int32_t sliding_window;   /* tokens that a sliding layer sees */
  int32_t temperature_tokens; /* t: queries at position p are multiplied by 1 + temperature_scale * ln(1 + floor(p /
                                 t)); with 0 tokens they are not */
  float temperature_scale;
  float rms_epsilon;
  float embedding_scale;
  float residual_scale; /* what a block adds to the residual stream is multiplied by it */
  float logit_scale;    /* logits are multiplied by it */
  float attention_scale;
  float attention_softcap; /* c: scores become c * tanh(score / c); 0: they stay */
  float logit_softcap;     /* the same for logits, after logit_scale */
  int32_t n_expert;        /* of a layer with a mixture; 0: there is none */
  int32_t n_expert_used;   /* experts that a row goes through */
  int32_t n_ff_expert;     /* a multiple of 32 */
  int32_t expert_gating;   /* EC_GATING_... */
  int32_t norm_experts;    /* the gates of a row's experts are divided by their sum (1) or not (0) */
  float expert_scale;      /* gates are multiplied by it */
  float glu_limit;         /* l: gates g become min(g, l) * sigmoid(glu_slope * min(g, l)), and what they multiply, u,
                              becomes 1 + u, where u is kept from -l to l; 0: they do not */
  float glu_slope;
  int32_t attention_gate;   /* EC_Q has twice as many rows: those of a head's query, then those of a gate, whose sigmoid
                               multiplies the head's result */
  int32_t state_rule;       /* EC_RULE_..., of layers with a recurrent state; below, their sizes */
  int32_t n_state_head;     /* heads, each with a state of n_state_key x n_state_value */
  int32_t n_state_key_head; /* keys (and queries) of a row; each belongs to the same number of heads */
  int32_t n_state_key;
  int32_t n_state_value;
  int32_t state_tiled;      /* head h has key h % n_state_key_head (1), or neighbouring heads have the same (0) */
  int32_t norms_after_rope; /* norms of queries and keys stand behind their rotation (1) or before it (0) */
  int32_t early_router;     /* a router reads what enters its layer (1) or what its experts read (0) */
  int32_t norm_period;      /* behind each group of so many layers but the last, the residual stream goes through the
                               norm before the output; 0: nowhere */
  int32_t scaled_vectors;   /* embedding_scale multiplies vectors in place of embeddings, too (1), or not (0) */
} ec_config;

/* How a row changes a recurrent state: by the gated delta rule, or by that of a state space (Mamba-2), where softplus
 * of alpha is also what the value is multiplied by. */
enum { EC_RULE_NONE, EC_RULE_DELTA, EC_RULE_SPACE };

/* What is special about a layer: it sees the last sliding_window tokens; its queries and keys are not rotated. */
enum { EC_LAYER_SLIDES = 1, EC_LAYER_UNROTATED = 2 };

/* What stands before the feed-forward block of a layer: nothing, attention, a short convolution, a recurrence, or
 * attention and a recurrence side by side. */
enum { EC_MIXER_NONE, EC_MIXER_ATTENTION, EC_MIXER_CONVOLUTION, EC_MIXER_RECURRENT, EC_MIXER_BOTH };

/* The shape of a layer. A layer that reads the keys and values of another one has neither EC_K nor EC_V. */
typedef struct ec_layer {
  int32_t flags; /* EC_LAYER_... */
  int32_t mixer; /* EC_MIXER_... */
  int32_t n_head; /* this number and the next two are of attention */
  int32_t n_head_kv;
  int32_t head_dim;
  int32_t n_ff;    /* of the feed-forward block, in a layer with experts of the shared one; 0: there is none */
  int32_t kv_from; /* the layer whose keys and values it reads: its own number, or that of a layer before it */
} ec_layer;

/* The stages of a forward that read weights. */
enum { EC_PART_QKV, EC_PART_ATTN_OUT, EC_PART_GATE_UP, EC_PART_DOWN, EC_PART_OUTPUT };

/* The bytes of a tile file that one stage reads. */
typedef struct ec_part {
  int32_t stage;
  int32_t layer;             /* 0 for the output matrix */
  int64_t row_begin, row_end; /* rows of the output matrix, from a multiple of 32 on; else 0 */
  uint64_t offset;           /* a multiple of 64 */
  uint64_t n_bytes;
  const void *data;          /* the part in memory, borrowed; NULL: each forward reads it */
} ec_part;

typedef struct ec_model ec_model;
typedef struct ec_session ec_session;
typedef struct ec_kernels ec_kernels;
typedef struct ec_mapping ec_mapping;

/* One session's rows of a forward. */
typedef struct ec_item {
  ec_session *session;
  int32_t n_past;
  int32_t n_rows;
  const int32_t *tokens;  /* [n_rows], or NULL when hidden is given */
  const float *hidden;    /* [n_rows][(1 + n_added) * n_embd] */
  int32_t first_layer;    /* the layer to begin with */
  int32_t n_wanted;       /* rows whose logits are wanted */
  const int32_t *wanted;  /* [n_wanted], ascending */
  const int32_t *parents; /* [n_rows], -1 for the cached prefix; NULL for a chain */
  const uint8_t *attn;    /* [n_layer], which attention blocks run; NULL for all */
  const uint8_t *mlp;     /* [n_layer] */
  const int32_t *taps;    /* [n_taps], layers whose output to copy */
  float *tapped;          /* [n_taps][n_rows][n_embd] */
  int32_t n_taps;
  int32_t block;          /* EC_BLOCK_... */
  int32_t n_added;        /* behind each of the layers from 0 on, of so many, the next n_embd numbers of `hidden` are
                             added to the state; first_layer is 0 then */
  const int32_t *places;  /* [n_past + n_rows][3], of each slot: the places that its pairs turn to, the first one
                             unless ec_model_set_rope says which; NULL: all are its number */
  const int32_t *mass_layers; /* [n_mass], the layers whose attention is added up; of a chain only */
  const float *mass_weights;  /* [n_mass][n_rows], what the attention of each row is multiplied by; 0: left out */
  float *mass;            /* [n_mass][n_mass_heads][n_mass_slots], to which each row's attention is added, by slot */
  int32_t n_mass;
  int32_t n_mass_heads;   /* at least those of each of these layers */
  int32_t n_mass_slots;   /* at least n_past + n_rows */
} ec_item;

/* Whether an item's rows are a block: none; a block in which a row sees the rows before it, or in which all rows see
 * one another, whose windows are counted from its first row; or one in which all rows see one another, whose windows
 * are counted from each row (in models without states). A block has no parents. */
enum { EC_BLOCK_NONE, EC_BLOCK_CAUSAL, EC_BLOCK_WHOLE, EC_BLOCK_MUTUAL };

EC_API int32_t ec_abi_version(void);
EC_API const char *ec_last_error(void);

/* The instruction sets that this processor and this build have, the best first, separated by spaces. */
EC_API const char *ec_instruction_sets(void);

/* Return the bytes per second at which n_threads read n_bytes of memory once; 0 where that can't be measured. */
EC_API double ec_read_bandwidth(int32_t n_threads, uint64_t n_bytes);

/* Have the threads of all forwards on n_threads threads keep to cores: thread i to the n_cpus[i] logical processors
 * that follow one another in `cpus`; 0 stands for no change. The caller of a forward does so during the forward. On
 * other systems than Linux, nothing happens. */
EC_API int32_t ec_keep_to_cores(int32_t n_threads, const int32_t *cpus, const int32_t *n_cpus);

/* Read the pages of 4,096 bytes that hold the bytes [offset, offset + n_bytes) of a file (a descriptor, on Windows a
 * handle) to the page-aligned memory at `pages`. */
EC_API int32_t ec_file_read(int64_t file, uint64_t file_bytes, uint64_t offset, uint64_t n_bytes, void *pages);

/* A mapped file that may be cut short or be on a disk that fails: POSIX systems send SIGBUS then, which ends a process.
 * While an ec_mapping is open, a fault inside of the whole pages [data, data + n_bytes) is caught: zeros are mapped
 * over all of them, and every later check returns EC_UNREADABLE. Other faults go to the handler that was there before.
 * A handler that is installed later is called as well, as each check puts this library's handler on top again. `file`
 * is the descriptor, which the caller keeps open: after a change of the file's size or modification time, checks return
 * EC_UNREADABLE, too. A negative one stands for none. On Windows, where a mapped file can't be cut short, all of this
 * does nothing. Close the mapping before its memory is unmapped. */
EC_API int32_t ec_mapping_open(const void *data, uint64_t n_bytes, int64_t file, ec_mapping **mapping);
EC_API int32_t ec_mapping_check(const ec_mapping *mapping);
EC_API void ec_mapping_close(ec_mapping *mapping);

/* Return the bytes of the tiles of a matrix; 0 where its type or shape is not supported. */
EC_API uint64_t ec_tile_bytes(int32_t type, int64_t n_rows, int64_t n_cols);
/* Write the rows [row_begin, row_end) of a matrix to the tiles of the whole matrix. `source` has the bytes of these
 * rows in the GGUF; row_begin is a multiple of 16. */
EC_API int32_t ec_tile_pack(int32_t type, int64_t n_rows, int64_t n_cols, int64_t row_begin, int64_t row_end,
                            const void *source, uint64_t source_bytes, void *tiles, uint64_t tile_bytes);
/* Write rows of a matrix, as a GGUF has them in any type that has tiles, as rows of Q4_0. */
EC_API int32_t ec_rows_to_q4_0(int32_t type, int64_t n_rows, int64_t n_cols, const void *source, uint64_t source_bytes,
                               void *rows, uint64_t n_bytes);
/* Make a model. instruction_set is a name of ec_instruction_sets(), or NULL for the best one; max_rows is the most rows
 * of one forward. */
EC_API int32_t ec_model_create(const ec_config *config, int32_t n_threads, int32_t max_rows,
                               const char *instruction_set, ec_model **model);
/* Set a matrix. Its tiles are borrowed and must outlive the model. */
EC_API int32_t ec_model_set_matrix(ec_model *model, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                                   int64_t n_cols, const void *tiles, uint64_t tile_bytes);
/* Set the mapping (borrowed) of the tiles, which each forward checks at its beginning and end. */
EC_API void ec_model_set_mapping(ec_model *model, const ec_mapping *mapping);
/* Have forwards read rows of EC_TOKEN_EMBD or EC_PER_LAYER_ROWS from the file of its tiles, where these begin at
 * `offset`; the matrix was set or placed before, and its mapped memory is not touched. `file` is a descriptor (on Windows
 * a handle) that stays open. */
EC_API int32_t ec_model_read_rows(ec_model *model, int32_t which, int64_t file, uint64_t file_bytes, uint64_t offset);
/* In place of ec_model_set_matrix: set where a matrix's tiles lie in a file of which each forward reads parts; offset
 * is a multiple of 64. */
EC_API int32_t ec_model_place_matrix(ec_model *model, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                                     int64_t n_cols, uint64_t offset, uint64_t tile_bytes);
/* Set the parts of a model whose matrices were placed, before ec_model_finish: in the order of layers and stages, the
 * parts of the output matrix last, in the order of rows. `file` is a descriptor (on Windows a handle) that stays open,
 * opened around the system's cache or not. Parts whose data is NULL are read ahead into a ring of ring_bytes, at least
 * three times the largest of them in whole pages. */
EC_API int32_t ec_model_stream(ec_model *model, int64_t file, uint64_t file_bytes, const ec_part *parts,
                               int32_t n_parts, uint64_t ring_bytes);
/* Have experts read when rows choose them, after ec_model_stream; no part holds their matrices. The n_slots experts
 * that were used most of late stay in memory, at least as many as a row goes through. */
EC_API int32_t ec_model_stream_experts(ec_model *model, int32_t n_slots);
/* Return how many bytes of parts and experts were read so far. */
EC_API uint64_t ec_model_streamed_bytes(ec_model *model);
/* Set a vector, which is copied. */
EC_API int32_t ec_model_set_vector(ec_model *model, int32_t which, int32_t layer, const float *values, int64_t n);
/* Set the shapes of the layers, [n_layer]. */
EC_API int32_t ec_model_set_layers(ec_model *model, const ec_layer *layers);
/* Set the rotation of queries and keys: the radians per position of each of n pairs, 2 * n at most the length of a
 * head, and what rotated elements are multiplied by. `sliding` is 1 for a rotation that only sliding layers have, 0 for
 * that of all others. axes, [n], says which of a row's three places each pair turns to, 0 to 2; NULL where all turn to
 * its position. */
EC_API int32_t ec_model_set_rope(ec_model *model, int32_t sliding, const double *frequencies, const uint8_t *axes,
                                 int64_t n, double magnitude);
/* Set how far ahead of what is multiplied weights of a type are fetched in products with n_rows rows: l1_bytes into the
 * L1 cache (0: they are not; -1: as is usual for the instruction set), and l2_times times into the L2 cache, the last
 * time l2_bytes ahead, before that twice as many and so on, EC_MOST_AHEAD at most. There are settings for 1 to
 * EC_AHEAD_ROWS rows, the last of which is for more rows, too. They change no bit of a result, and may be changed between
 * forwards. Without this call, they are the usual ones. */
enum { EC_AHEAD_ROWS = 16, EC_AHEAD_USUAL = -1, EC_MOST_AHEAD = 65536 };
EC_API int32_t ec_model_set_ahead(ec_model *model, int32_t type, int32_t n_rows, int32_t l1_bytes, int32_t l2_bytes,
                                  int32_t l2_times);
/* Write the seconds that the model's threads take to multiply n_rows rows with n_bytes of the model's weights of a type,
 * in whole pieces, from the piece with byte first_byte of them on; the first one follows the last one. Weights that are
 * not in memory all the time are not counted. The model must be finished. */
EC_API int32_t ec_model_time_products(ec_model *model, int32_t type, int32_t n_rows, uint64_t first_byte,
                                      uint64_t n_bytes, double *seconds);
/* Have an adapter change a matrix that is set or placed, before ec_model_finish: W x becomes W x + scale * factor *
 * B (A x), where scale is the session's (ec_session_adapt). A is [rank][columns of W], B is [rows of W][rank]; both are
 * tiles of F32, F16 or BF16, borrowed. Adapters are numbered from 0 on, and what they add is added in that order.
 * EC_TOKEN_EMBD, EC_OUTPUT, EC_PER_LAYER_ROWS and the matrices of experts can't be changed. */
EC_API int32_t ec_model_adapt(ec_model *model, int32_t adapter, int32_t which, int32_t layer, int32_t type,
                              int64_t rank, float factor, const void *a, uint64_t a_bytes, const void *b,
                              uint64_t b_bytes);
/* Check that all matrices and vectors are set, and allocate the memory of forwards. */
EC_API int32_t ec_model_finish(ec_model *model);
/* Write the embeddings of n tokens: that of token i to out + i * stride, n_embd floats. Return EC_OK, or
 * EC_UNREADABLE. */
typedef int32_t (*ec_look_up)(const int32_t *tokens, int32_t n, float *out, int64_t stride);
/* Finish a model without weights, whose text another library evaluates. Its sessions hold what a draft head knows of
 * their text, and no keys and values; ec_forward refuses it. look_up finds the embeddings that a head borrows, before
 * the factor embedding_scale; NULL where heads have their own. It is called inside the functions of a head, by the
 * thread that calls them. */
EC_API int32_t ec_model_finish_elsewhere(ec_model *model, ec_look_up look_up);
EC_API const char *ec_model_instruction_set(const ec_model *model);
/* Return the seconds that all forwards so far spent in each operation, waiting for other threads included. */
EC_API void ec_model_seconds(const ec_model *model, double *seconds /* [EC_N_OPERATIONS] */);
/* Return how many experts the rows of a layer went through, of all forwards so far, by the number n of these rows:
 * n_layers[n] layers, n_experts[n] different experts. Both have max_rows + 1 elements; all are 0 without experts. */
EC_API void ec_model_experts(const ec_model *model, uint64_t *n_layers, uint64_t *n_experts);
/* Write to counts[2], of experts that are read from a file: how many the rows of layers wanted, and how many of these
 * were in memory then. */
EC_API void ec_model_expert_reads(const ec_model *model, uint64_t *counts);
EC_API void ec_model_destroy(ec_model *model);

EC_API int32_t ec_session_open(ec_model *model, int32_t n_ctx, int32_t kv_type, ec_session **session);
/* Make a second session that shares the first n_tokens of the first one, which drops what it holds behind them. */
EC_API int32_t ec_session_fork(ec_session *session, int32_t n_tokens, ec_session **fork);
/* Move the slots source[0], ..., source[n - 1] to start, start + 1, ...; they are ascending, and none is before its
 * target. */
EC_API int32_t ec_session_move(ec_session *session, const int32_t *source, int32_t n, int32_t start);
EC_API uint64_t ec_session_saved_bytes(const ec_session *session, int32_t n_tokens);
/* `places` are those of ec_item, of the first n_tokens slots. */
EC_API int32_t ec_session_save(ec_session *session, int32_t n_tokens, const int32_t *places, void *target,
                               uint64_t n_bytes);
EC_API int32_t ec_session_load(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes);
/* Set what the session multiplies each adapter's part by: n numbers, by adapter; 0 leaves an adapter out. The rows that
 * the session holds belong to the numbers before, so that the next forward begins with n_past 0. Forks have the same. */
EC_API int32_t ec_session_adapt(ec_session *session, const float *scales, int32_t n);
/* The vectors in place of embeddings that the first n_tokens began with, as far as the session needs them to go back:
 * they are no part of what ec_session_save writes. Load them after that. */
EC_API uint64_t ec_session_vector_bytes(const ec_session *session, int32_t n_tokens);
EC_API int32_t ec_session_save_vectors(const ec_session *session, int32_t n_tokens, void *target, uint64_t n_bytes);
EC_API int32_t ec_session_load_vectors(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes);
EC_API void ec_session_close(ec_session *session);

/* Evaluate rows of several sessions, and write logits [sum of n_wanted][n_vocab] and, unless it is NULL, best [sum of
 * n_wanted]: the token with the greatest logit of each row, of equals the first. Where *cancel becomes other than 0,
 * the forward stops between two layers and returns EC_CANCELLED. EC_UNREADABLE: weights can't be read, or the check of
 * the mapping fails. EC_NOT_FINITE: a logit is infinite or NaN, as damaged weights cause. The results are not usable
 * then. */
EC_API int32_t ec_forward(ec_model *model, const ec_item *items, int32_t n_items, float *logits, int32_t *best,
                          const volatile int32_t *cancel);

/* Draft heads (draft_head/draft_head.h). */

/* A draft head reads pairs (EAGLE-3), or a matrix joins them (nextn), or it drafts blocks (DFlash, DSpark). */

/* The matrices and vectors of a draft head. EC_DRAFT_HEAD_EMBEDDING is absent where it reads the target's
 * embeddings. */
enum {
  /* of a layer */
  EC_DRAFT_HEAD_Q,
  EC_DRAFT_HEAD_K,
  EC_DRAFT_HEAD_V,
  EC_DRAFT_HEAD_ATTN_OUT,
  EC_DRAFT_HEAD_GATE,
  EC_DRAFT_HEAD_UP,
  EC_DRAFT_HEAD_DOWN,
  /* [2 * conv_length * n_embd / conv_group, n_embd], where conv_length is not 0: the kernels around the attention, and
   * around the feed-forward block */
  EC_DRAFT_HEAD_ATTN_KERNELS,
  EC_DRAFT_HEAD_FFN_KERNELS,
  EC_DRAFT_HEAD_N_LAYER_MATRICES,
  /* of the head */
  EC_DRAFT_HEAD_FC = EC_DRAFT_HEAD_N_LAYER_MATRICES,
  EC_DRAFT_HEAD_OUTPUT,
  EC_DRAFT_HEAD_EMBEDDING,
  EC_DRAFT_HEAD_JOINT,        /* [n_embd, 2 * n_embd], which reads an embedding and a feature, of a head that joins them;
                                 such a head may lack EC_DRAFT_HEAD_FC: its only tap is the feature then */
  EC_DRAFT_HEAD_MARKOV_W1,    /* [n_vocab of the target, rank] */
  EC_DRAFT_HEAD_MARKOV_W2,    /* [n_vocab, rank]; [n_vocab of the target, rank] of EC_MARKOV_SELECTOR */
  EC_DRAFT_HEAD_MARKOV_GATE,  /* [rank, n_embd + rank] of EC_MARKOV_GATED, [rank, n_embd] of EC_MARKOV_SELECTOR */
  EC_DRAFT_HEAD_MARKOV_JOINT, /* [3 * rank, 2 * rank + n_embd], of EC_MARKOV_RNN */
  EC_DRAFT_HEAD_N_MATRICES
};
enum {
  /* of a layer */
  EC_DRAFT_HEAD_EMBEDDING_NORM, /* of the embeddings of pairs */
  EC_DRAFT_HEAD_ATTN_NORM,      /* of the features of pairs, or of what a layer reads */
  EC_DRAFT_HEAD_FFN_NORM,
  EC_DRAFT_HEAD_Q_NORM, /* [head_dim], absent where heads are not normed */
  EC_DRAFT_HEAD_K_NORM,
  EC_DRAFT_HEAD_ATTN_KERNELS_BASE, /* [2][conv_length][n_embd], added to the kernels: before, behind the block */
  EC_DRAFT_HEAD_FFN_KERNELS_BASE,
  EC_DRAFT_HEAD_N_LAYER_VECTORS,
  /* of the head */
  EC_DRAFT_HEAD_OUTPUT_NORM = EC_DRAFT_HEAD_N_LAYER_VECTORS, /* absent where no norm stands before the output matrix */
  EC_DRAFT_HEAD_FC_NORM,      /* [n_taps * n_embd of the target], where fc_norm is not EC_FC_NORM_NONE */
  EC_DRAFT_HEAD_FEATURE_NORM, /* of features, for blocks and for pairs that are joined */
  EC_DRAFT_HEAD_PAIR_NORM,    /* of embeddings, for pairs that are joined */
  EC_DRAFT_HEAD_ROPE_DIVISORS,
  EC_DRAFT_HEAD_MASK, /* the embedding of masked rows, where mask_token is -1 */
  EC_DRAFT_HEAD_MARKOV_GATE_BIAS,
  EC_DRAFT_HEAD_MARKOV_JOINT_BIAS,
  EC_DRAFT_HEAD_CONFIDENCE, /* [n_embd + rank]; absent where the head has none */
  EC_DRAFT_HEAD_CONFIDENCE_BIAS,
  EC_DRAFT_HEAD_N_VECTORS
};
/* The norm before fc: none, one over all taps together, or one over each tap. */
enum { EC_FC_NORM_NONE, EC_FC_NORM_JOINED, EC_FC_NORM_EACH };
/* How the scores of a row of a block depend on the token before: not at all, by the product of W2 and its row of W1
 * alone, with a gate, or with a recurrent state. A selector scores the best tokens of the row alone, and adds to each
 * the product of its own row of W2 and the gated row of W1; all others score EC_NOT_SELECTED, which softmax makes 0. */
enum { EC_MARKOV_NONE, EC_MARKOV_VANILLA, EC_MARKOV_GATED, EC_MARKOV_RNN, EC_MARKOV_SELECTOR };
#define EC_NOT_SELECTED -1e30f
enum { EC_MOST_BLOCK = 128 };

typedef struct ec_draft_head_config {
  int32_t n_vocab; /* tokens that the head can draft */
  int32_t n_embd;
  int32_t n_layer; /* 1 of a head whose attention reads pairs */
  int32_t n_head;
  int32_t n_head_kv;
  int32_t head_dim;
  int32_t n_ff;
  int32_t n_taps;
  int32_t fc_norm;
  int32_t norm_before_residual; /* the residual stream begins with the feature after its norm */
  int32_t feeds_back_normed;    /* the next pair gets the layer's output after the output norm */
  int32_t block_size;    /* rows of a block, at most EC_MOST_BLOCK; 0: the head reads pairs, and nothing below but
                            rms_epsilon and rope_base is read */
  int32_t block_shifted; /* row i scores the token behind its own position (1), or at it (0): then row 0 scores none */
  int32_t block_causal;  /* a row sees the rows before it (1), or all rows of the block (0) */
  int32_t markov;        /* EC_MARKOV_... */
  int32_t rank;
  int32_t top_k;         /* tokens that EC_MARKOV_SELECTOR scores in a row; else 0 */
  int32_t conv_length;   /* rows that the convolutions before and behind a layer's blocks go over; 0: there are none */
  int32_t conv_group;    /* elements that share what is added to their kernels */
  int32_t mask_token;    /* whose embedding masked rows have; -1: EC_DRAFT_HEAD_MASK */
  float rms_epsilon;
  float rope_base;
  float embedding_scale; /* of the embeddings and the mask */
  float logit_scale;
  float logit_softcap;
} ec_draft_head_config;

typedef struct ec_draft_head ec_draft_head;

/* How a chain is drafted: of at most n_max nodes; it ends with the node at which the product of the nodes' chances
 * (`sure` of ec_drafted) falls below least_path, or after most_seconds. A chance p counts as p * factors[i], at most
 * 0.995, where i is the number of edges at or below p. */
typedef struct ec_draft_rules {
  int32_t n_max;
  int32_t n_edges;
  const float *edges;   /* [n_edges], ascending */
  const float *factors; /* [n_edges + 1], or NULL for 1 */
  double least_path;
  double most_seconds;
} ec_draft_rules;

/* A node of a chain: the most probable token, and the second one (-1 for none), with the head's probabilities. `sure`
 * is the chance that it is accepted where all nodes before it are, by the head's confidence; p where it has none. */
typedef struct ec_drafted {
  int32_t token;
  float p;
  int32_t second_token;
  float second_p;
  float sure;
} ec_drafted;

/* A text to draft for: its session, and `token`, which stands at position n_past and was not evaluated yet. For
 * ec_draft_scores, an n_past of -1 says that `token` was drafted behind what the last call read. */
typedef struct ec_draft_item {
  ec_session *session;
  int32_t n_past;
  int32_t token;
  ec_draft_rules rules; /* of ec_draft_chains */
  ec_drafted *nodes;    /* [rules.n_max], for ec_draft_chains */
  float *scores;        /* [n_vocab of the head], for ec_draft_scores */
  int32_t n_found;      /* the result */
} ec_draft_item;

/* Make a draft head of a model. taps: layers of the target, 0 to n_layer, whose input the features are made of.
 * tokens: for each of the n_vocab rows of the output matrix the target's token id. windows: for each layer how many
 * positions before a block its rows see, 0 for all; NULL: all layers see all. layers: of a head that joins pairs, the
 * sizes and switches of its layers, which ec_draft_head_layers then returns; NULL for other heads. The head must be
 * destroyed before the model. */
EC_API int32_t ec_draft_head_create(ec_model *target, const ec_draft_head_config *config, const ec_config *layers,
                                    const int32_t *taps, const int32_t *tokens, const int32_t *windows,
                                    ec_draft_head **head);
/* Return the layers of a head that joins pairs, as a model without embeddings that the head owns: the functions
 * ec_model_set_... give it its matrices, vectors, layers and rotations, before ec_draft_head_finish. Without an output
 * matrix it takes the first rows of the target's. */
EC_API ec_model *ec_draft_head_layers(ec_draft_head *head);
/* Set a matrix of a draft head; `layer` is 0 for those that no layer has. Its tiles are borrowed and must outlive the
 * head. */
EC_API int32_t ec_draft_head_set_matrix(ec_draft_head *head, int32_t which, int32_t layer, int32_t type,
                                        int64_t n_rows, int64_t n_cols, const void *tiles, uint64_t tile_bytes);
/* Set a vector of a draft head, which is copied. */
EC_API int32_t ec_draft_head_set_vector(ec_draft_head *head, int32_t which, int32_t layer, const float *values,
                                        int64_t n);
EC_API int32_t ec_draft_head_finish(ec_draft_head *head);
EC_API void ec_draft_head_destroy(ec_draft_head *head);

/* Have a draft head follow a session's text from its next forward on; NULL: none does any more. The head's state goes
 * with the session: it is dropped beyond each n_past, moved, forked and closed. A session must be closed before its
 * head is destroyed. */
EC_API int32_t ec_session_follow(ec_session *session, ec_draft_head *head);
/* Have the draft head that follows a session take rows that another library has evaluated; nothing happens where no
 * head follows. Of the item are read: session, n_past, n_rows, tokens, parents (only whether there are any), n_wanted,
 * n_taps and tapped, which holds what enters the layers that the head taps, in their order. */
EC_API int32_t ec_session_take(const ec_item *item);
/* Write for each of n texts, of sessions of one model, the scores of what follows its token; n_found is 0 where they
 * are not known, else 1. All texts are read together; each gets the bits that it would get alone. A session stands
 * there once. EC_NOT_FINITE: a score is infinite or NaN. So in ec_draft_chains. */
EC_API int32_t ec_draft_scores(ec_draft_item *items, int32_t n);
/* Draft a chain behind each of n texts, of sessions of one model: n_found nodes by its rules. All texts are drafted
 * together; each gets the chain that it would get alone. A session stands there once. */
EC_API int32_t ec_draft_chains(ec_draft_item *items, int32_t n);
/* Write the scores of what follows each of the last n_new of n_nodes nodes of a tree, [n_new][n_vocab of the head],
 * behind the token of the last ec_draft_scores call for the session, whose n_past was not -1. parents: -1 for that
 * token, or an earlier node. The nodes before the last n_new are those of the last call for the tree. n_found is 0
 * where there is no room, or a block has no row for one of them, else 1. EC_NOT_FINITE: a score is infinite or NaN. */
EC_API int32_t ec_draft_branches(ec_session *session, const int32_t *tokens, const int32_t *parents, int32_t n_nodes,
                                 int32_t n_new, float *scores, int32_t *n_found);
/* Return the seconds that a session's draft head has spent on the text, drafts not included. */
EC_API double ec_draft_read_seconds(const ec_session *session);
/* Return the bytes that a session's head holds of its text. */
EC_API uint64_t ec_draft_state_bytes(const ec_session *session);
/* What the head keeps of the first n_tokens, as bytes; 0 bytes where no head follows. */
EC_API uint64_t ec_draft_saved_bytes(const ec_session *session, int32_t n_tokens);
EC_API int32_t ec_draft_save(ec_session *session, int32_t n_tokens, void *target, uint64_t n_bytes);
EC_API int32_t ec_draft_load(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes);

/* Searching one row of n logits, for sampling. Indices are written in ascending order. */

/* Return the kernels of an instruction set, or of the best one for NULL, which live as long as the library; NULL where
 * there is no set of that name. */
EC_API const ec_kernels *ec_find_kernels(const char *instruction_set);

/* Set *most to the greatest value, and return the sum of exp(value - *most), NaN where a value is not finite. */
EC_API double ec_row_total(const ec_kernels *kernels, const float *row, int64_t n, float *most);
/* Write the indices of at most `capacity` values that are at least threshold; return how many there are. */
EC_API int64_t ec_row_above(const ec_kernels *kernels, const float *row, int64_t n, float threshold, int64_t *indices,
                            int64_t capacity);
/* Write the indices of the top_k greatest values, of equal values those with the lowest indices; 1 <= top_k <= n. */
EC_API int32_t ec_row_top_k(const ec_kernels *kernels, const float *row, int64_t n, int64_t top_k, int64_t *indices);
/* Write the indices of the fewest greatest values whose exponentials sum to at least top_p of the whole. `capacity` and
 * the result are as in ec_row_above; the result is -1 where a value is not finite. */
EC_API int64_t ec_row_nucleus(const ec_kernels *kernels, const float *row, int64_t n, double top_p, int64_t *indices,
                              int64_t capacity);
/* Write a few indices, one of which is argmax over i of row[i] / temperature - log(-log(u(key, i))), where u is a hash
 * (see edgedec/sampling.py). `capacity` and the result are as in ec_row_above. */
EC_API int64_t ec_row_contenders(const ec_kernels *kernels, const float *row, int64_t n, float temperature,
                                 uint64_t key, int64_t *indices, int64_t capacity);

#ifdef __cplusplus
}
#endif
#endif
