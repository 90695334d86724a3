// Pictures that a message takes along: made small here, and sent with the message itself.

const MOST_PIXELS = 1536; // of the longer side
const THUMBNAIL_PIXELS = 192; // of what the history keeps
const MOST_BYTES = 64_000_000; // of a file
export const MOST_PICTURES = 8; // of a conversation, as the server takes them

export const isPicture = (file) => file.type.startsWith("image/");

// Return {name, text, note, picture, thumbnail} of a picture's file, the last two as data: URLs; throws an Error where
// the browser can't read it. Nothing but the pixels is sent: a camera's notes, such as the place, stay here.
export async function readPicture(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is too large for a picture.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is no picture that this browser can read.`);
  }
  try {
    const picture = drawn(bitmap, MOST_PIXELS);
    const note = `${picture.width} × ${picture.height}`;
    return { name: file.name, text: "", note, picture: asUrl(picture), thumbnail: asUrl(drawn(bitmap, THUMBNAIL_PIXELS)) };
  } finally {
    bitmap.close();
  }
}

// What is sent of a picture: after the page was opened again, only the small copy is there.
export const sentUrl = ({ picture, thumbnail }) => picture ?? thumbnail;

function drawn(bitmap, most) {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

const asUrl = (canvas) => canvas.toDataURL("image/jpeg", 0.9);
