// Files that a message takes along: texts and pictures are read here, PDFs by the server. Sizes are bounded.

import { pdfText } from "/static/api.js";
import { isPicture, MOST_PICTURES, readPicture } from "/static/pictures.js";

const MOST_CHARACTERS = 1_000_000; // of all files of a message
const MOST_PDF_BYTES = 8_000_000; // the server's --max-body may be less

// Return {name, text, note} of a file; throws an Error that says why it can't be taken.
export async function readFile(file, settings) {
  if (isPicture(file)) return readPicture(file);
  const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  if (isPdf) {
    if (file.size > MOST_PDF_BYTES) throw refusal(file, `has ${megabytes(file.size)}; a PDF may have ${megabytes(MOST_PDF_BYTES)}`);
    try {
      const { text, n_pages: pages, cut } = await pdfText(file, settings);
      return { name: file.name, text, note: `${pages} ${pages === 1 ? "page" : "pages"}${cut ? ", its end is left out" : ""}` };
    } catch (error) {
      throw refusal(file, error instanceof TypeError ? "could not be sent: the server can't be reached" : `is refused: ${error.message}`);
    }
  }
  if (file.size > 4 * MOST_CHARACTERS) throw tooLong(file);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw refusal(file, "is no text in UTF-8; texts, PDFs and pictures can be attached");
  if (!text.trim()) throw refusal(file, "is empty");
  const plain = text.replace(/\r\n?/g, "\n");
  return { name: file.name, text: plain, note: `${plain.length.toLocaleString("en")} characters` };
}

// Throw where a file does not fit beside those that are there.
export function requireRoom(files, file) {
  const all = [...files, file];
  if (all.reduce((sum, { text }) => sum + text.length, 0) > MOST_CHARACTERS) throw tooLong(file);
  if (all.filter(({ thumbnail }) => thumbnail).length > MOST_PICTURES) throw refusal(file, `is one too many: ${MOST_PICTURES} pictures can be sent`);
}

function tooLong(file) {
  return refusal(file, `is too long: the files of a message may have ${MOST_CHARACTERS.toLocaleString("en")} characters`);
}

function refusal(file, why) {
  return new Error(`${file.name} ${why}.`.replace(/\.\.$/, "."));
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}
