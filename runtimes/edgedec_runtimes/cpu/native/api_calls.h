// What all functions of the C interface share: checks of arguments, and exceptions turned into error codes.
#pragma once
#include <new>
#include <stdexcept>
#include <string>

#include "forward/model.h"
#include "weights/tiles.h"

extern "C" {
/* What ec_session_save writes behind keys and values, by itself: what else the session needs of the first n_tokens. */
EC_API uint64_t ec_session_state_bytes(const ec_session *session, int32_t n_tokens);
EC_API int32_t ec_session_save_state(ec_session *session, int32_t n_tokens, const int32_t *places, void *target,
                                     uint64_t n_bytes);
EC_API int32_t ec_session_load_state(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes);
/* Copy the keys and values of the slots [begin, end) in whole pages of 64, as they lie in memory, which does not depend
 * on how many slots there are. */
EC_API uint64_t ec_session_page_bytes(const ec_session *session);
EC_API int32_t ec_session_save_pages(const ec_session *session, int32_t begin, int32_t end, void *target,
                                     uint64_t n_bytes);
EC_API int32_t ec_session_load_pages(ec_session *session, int32_t begin, int32_t end, const void *source,
                                     uint64_t n_bytes);
/* Return a number that another one of so many bytes has by chance once in 2^64: against damage, not against forgers. */
EC_API uint64_t ec_sum(const void *data, uint64_t n_bytes);
}
namespace edgedec {

inline thread_local std::string last_error;  // what ec_last_error() returns

template <class Body>
int32_t guarded(Body body) {
  try {
    return body();
  } catch (const Invalid &error) {
    last_error = error.what();
    return EC_INVALID;
  } catch (const std::bad_alloc &) {
    last_error = "the system refused memory";
    return EC_NO_MEMORY;
  } catch (const Unreadable &error) {
    last_error = error.what();
    return EC_UNREADABLE;
  } catch (const NotFinite &error) {
    last_error = error.what();
    return EC_NOT_FINITE;
  } catch (const std::exception &error) {
    last_error = error.what();
    return EC_INVALID;
  }
}

inline void require(bool holds, const char *message) {
  if (!holds) throw Invalid(message);
}

inline void check_tiles(int32_t type, int64_t n_rows, int64_t n_cols, uint64_t n_bytes) {
  const uint64_t expected = tile_bytes(type, n_rows, n_cols);
  require(expected != 0, "a matrix of this type or shape has no tiles");
  if (n_bytes != expected)
    throw Invalid("the tiles have " + std::to_string(n_bytes) + " bytes, expected " + std::to_string(expected));
}

}  // namespace edgedec
