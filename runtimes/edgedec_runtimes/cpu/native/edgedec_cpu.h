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

#include "edgedec_tables.h"

#if defined(_WIN32)
#define EC_API __declspec(dllexport)
#else
#define EC_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor type is ggml's number of it. Names of numbers and structures are those of native_tables.py. */

EC_API int32_t ec_abi_version(void);
/* Return the bytes of a structure; 0 where there is none of that name. */
EC_API uint64_t ec_size(const char *structure);
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
/* Return how many key-value heads each layer has, where heads can see slots of their own: all layers have as many, store
 * keys with their bias, see all of a text and have no states. Else 0. */
EC_API int32_t ec_session_gathered_heads(const ec_session *session);
/* Put into the slots from `start` on what the heads have in slots [layers][heads][n] of another session of the model. */
EC_API int32_t ec_session_gather(ec_session *session, const ec_session *source, const int32_t *slots, int32_t n,
                                 int32_t start);
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

#define EC_NOT_SELECTED -1e30f

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
 * head follows. Of the item are read: session, n_past, n_rows, tokens of groups, parents (only whether there are any), n_wanted,
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
/* Have rows of the draft head that follows a session stand behind rows of its forwards: n_behind[0] behind the newest
 * token's, n_behind[1] behind the first one of its draft, ..., in each forward that has logits of a chain or a tree.
 * They are expected to take `seconds` a forward. Nothing happens where no head follows, or one of another kind. */
EC_API int32_t ec_draft_place(ec_session *session, const int32_t *n_behind, int32_t n, double seconds);
/* Return how many rows of its head the session's latest forward had. */
EC_API int32_t ec_draft_added_rows(const ec_session *session);
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

/* Prompts that are kept on the disk, in blocks of whole pages of the KV cache. */

/* What else than keys and values the session needs of the first n_tokens to go on behind them, but not before them. */
EC_API uint64_t ec_session_state_bytes(const ec_session *session, int32_t n_tokens);
EC_API int32_t ec_session_save_state(ec_session *session, int32_t n_tokens, const int32_t *places, void *target,
                                     uint64_t n_bytes);
EC_API int32_t ec_session_load_state(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes);
/* Return the position from which rows are evaluated again where a text goes on behind the first n_tokens, which the
 * session holds; n_tokens where none are. */
EC_API int32_t ec_session_held_before(const ec_session *session, int32_t n_tokens);
/* Copy the keys and values of the slots [begin, end) in whole pages of 64, as they lie in memory, which does not depend
 * on how many slots there are. */
EC_API uint64_t ec_session_page_bytes(const ec_session *session);
EC_API int32_t ec_session_save_pages(const ec_session *session, int32_t begin, int32_t end, void *target,
                                     uint64_t n_bytes);
EC_API int32_t ec_session_load_pages(ec_session *session, int32_t begin, int32_t end, const void *source,
                                     uint64_t n_bytes);
/* The same of the keys and values of the draft head that follows the session; 0 bytes where none does. `saved` says
 * whether the head knows all these slots and one behind them; only then they are copied. Load pages one after another,
 * from slot 0 on: the head then knows the slots before `end`. */
EC_API uint64_t ec_draft_page_bytes(const ec_session *session);
EC_API int32_t ec_draft_save_pages(ec_session *session, int32_t begin, int32_t end, void *target, uint64_t n_bytes,
                                   int32_t *saved);
EC_API int32_t ec_draft_load_pages(ec_session *session, int32_t begin, int32_t end, const void *source,
                                   uint64_t n_bytes);
/* Return a number that another one of so many bytes has by chance once in 2^64: against damage, not against forgers. */
EC_API uint64_t ec_sum(const void *data, uint64_t n_bytes);

/* Picture encoders: vision transformers of the SigLIP kind, and what projects their rows to a text model's width. Weights
 * are read where they are, in rows as a GGUF has them: F32, F16, BF16 or Q8_0. The rows of a picture have the same bits
 * for any number of threads. */

/* instruction_set: as in ec_model_create. */
EC_API int32_t ec_encoder_create(const ec_encoder_config *config, int32_t n_threads, const char *instruction_set,
                                 ec_encoder **encoder);
/* Weights are not copied. transposed: the file has [n_cols][n_rows] (floats only). */
EC_API int32_t ec_encoder_set_matrix(ec_encoder *encoder, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                                     int64_t n_cols, int32_t transposed, const void *data, uint64_t n_bytes);
EC_API int32_t ec_encoder_set_vector(ec_encoder *encoder, int32_t which, int32_t layer, const float *values, int64_t n);
/* Watch the file that the weights are mapped from; NULL: none. It is closed after the encoder. */
EC_API void ec_encoder_set_mapping(ec_encoder *encoder, const ec_mapping *mapping);
EC_API int32_t ec_encoder_finish(ec_encoder *encoder);
/* Return the bytes that ec_encoder_encode holds meanwhile for n_x * n_y patches; 0 where it takes no such picture. */
EC_API uint64_t ec_encoder_buffer_bytes(const ec_encoder *encoder, int32_t n_x, int32_t n_y);
/* Write n_x * n_y / merge^2 rows of n_out numbers. patches: [n_y * n_x][n_patch]; positions: [n_y * n_x][n_embd].
 * EC_CANCELLED: *cancel became other than 0 (NULL: it never does). EC_NOT_FINITE: a number of a row is infinite or NaN.
 * mass: [n_y * n_x], the attention that each patch gets in the last layer, the mean of all heads and patches; or NULL.
 * flow: [n_layer][n_y * n_x], what each patch gives in a layer: the attention that the patches' mean query pays to it,
 * the mean of heads, times the sum of the sizes of its value's numbers, where a value is the mean of heads; or NULL. */
EC_API int32_t ec_encoder_encode(ec_encoder *encoder, const float *patches, const float *positions, int32_t n_x,
                                 int32_t n_y, float *rows, uint64_t n_numbers, const volatile int32_t *cancel,
                                 float *mass, float *flow);
EC_API void ec_encoder_destroy(ec_encoder *encoder);

#ifdef __cplusplus
}
#endif
#endif
