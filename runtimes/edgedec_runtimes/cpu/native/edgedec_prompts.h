/* The part of edgedec_cpu.h for prompts that are kept on the disk, in blocks of whole pages of the KV cache. */
#pragma once
#include "edgedec_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif
